"""vector-quantize-pytorch: `VectorQuantize`, alone or inside that library's other modules.

Legend: K codes, D dimensions, H codebooks (more than one where every head has its own).
It keeps _codebook.embed [H, K, D], .embed_avg [H, K, D], .cluster_size [H, K] and .initted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from topovq.interop.library import Library, Options, Replacement, given_first, package
from topovq.interop.states import Layout, State, below, export_statistics, fill, listed, statistics
from topovq.quantizers.arguments import ADVICE, RESIDUAL_ADVICE, refuse_arguments
from topovq.quantizers.kohonen import KohonenVQ
from topovq.quantizers.residual import learn_from_all
from topovq.quantizers.results import Ask, Part, Quantized

Kind = TypeVar("Kind", bound=KohonenVQ)

VECTOR_QUANTIZE = Layout("vector-quantize-pytorch", "_codebook.embed", "_codebook.embed_avg", "_codebook.cluster_size")

FOLLOW_THE_OUTPUT = "its codes follow the gradient of the output: build a KohonenVQ with this argument instead"


class VectorQuantizeReplacement(Replacement, KohonenVQ):
    """KohonenVQ where vector-quantize-pytorch's own modules hold a layer, with the way back."""

    like: Tensor

    def restored(self) -> nn.Module:
        codes_HKD, sums_HKD, counts_HK = (
            torch.stack(parts) for parts in zip(*(export_statistics(book) for book in self.books()))
        )
        tensors = {
            **dict(zip(VECTOR_QUANTIZE[1:], (codes_HKD, sums_HKD, counts_HK))),
            "_codebook.initted": self.codebook_of(0).initialized,
        }
        projections = {"project_in": self.project_in, "project_out": self.project_out}
        for name, projection in projections.items():
            tensors |= projection.state_dict(prefix=f"{name}.")
        module = self.remembered().filled(tensors, self.like, self.training)
        for name, projection in projections.items():
            setattr(module, name, projection)
        return module

    def forward(self, x: Tensor, mask: Tensor | None = None, *arguments: Any, **options: Any) -> Any:
        if mask is not None and mask.ndim < x.ndim - 1:  # beam search puts an axis of beams behind those of the mask
            mask = mask.reshape(*mask.shape, *(1,) * (x.ndim - 1 - mask.ndim)).expand(x.shape[:-1])
        return super().forward(x, mask, *arguments, **options)


class SharedReplacement(VectorQuantizeReplacement):
    """One of the layers that share a codebook inside `ResidualVQ`, which says when all have had their turn."""

    def _forward(self, x: Tensor, mask: Tensor | None, lens: Tensor | None, ask: Ask) -> tuple[Quantized, list[Part]]:
        with self.accumulate():
            return super()._forward(x, mask, lens, ask)

    def expire_codes_(self, x: Tensor) -> None:
        """Called last, with all that the layers quantized: one update from it, then dead codes revive."""
        if self.codebook_of(0).is_pending:
            learn_from_all(self, [x], [None])

    def update_in_place_optimizer(self) -> None:
        """Nothing: no optimizer moves the codes."""

    @property
    def _codebook(self) -> SimpleNamespace:
        return SimpleNamespace(**vars(super()._codebook), update_ema=lambda: None)  # expire_codes_ updates


def from_vector_quantize_pytorch(source: nn.Module | State, *, prefix: str | None = None, **options: Any) -> KohonenVQ:
    """A KohonenVQ with the codes, statistics and projections of a `VectorQuantize`, or of a state dict that holds one.

    A module also hands on its settings (layout, heads, decay, commitment weight, ...); a state dict does not know
    them. `options` are KohonenVQ's arguments and come before what was found.
    prefix  where in the state dict the quantizer is, such as "encoder.vq"; not needed where there is only one
    """
    if isinstance(source, nn.Module):
        if prefix is not None or not hasattr(source, "_codebook"):
            raise TypeError(
                f"a {type(source).__name__} (prefix={prefix!r}) is not a VectorQuantize: give that module itself, or a "
                "state dict and a prefix, or use replace_quantizers(model)"
            )
        return convert_vector_quantize(source, KohonenVQ, options)
    return _from_vector_quantize_state(source, prefix, KohonenVQ, options)


def convert_vector_quantize(module: nn.Module, kind: type[Kind], options: Options) -> Kind:
    """A `kind` of KohonenVQ with the state, the settings and the mode of a `VectorQuantize`."""
    options = given_first(options, _settings(module, options))
    return _from_vector_quantize_state(module.state_dict(), "", kind, options).train(module.training)


def _from_vector_quantize_state(state: State, prefix: str | None, kind: type[Kind], options: Options) -> Kind:
    own = below(state, VECTOR_QUANTIZE, prefix)
    codes_HKD, sums_HKD, counts_HK = statistics(own, VECTOR_QUANTIZE, "[H, K, D]")
    projections = [f"project_{way}.{part}" for way in ("in", "out") for part in ("weight", "bias")]
    unknown = sorted(own.keys() - {*VECTOR_QUANTIZE[1:], "_codebook.initted", *projections})
    if unknown:
        raise ValueError(
            f"{listed(unknown)} have no counterpart in KohonenVQ (layernorm_after_project_in, affine_param and "
            "vq_bridge leave such tensors)"
        )
    missing = [name for name in projections if name not in own]
    if missing and missing != projections:
        raise ValueError(f"{listed(missing)} are missing beside the other projections; found {listed(sorted(own))}")
    books, size, code_dim = codes_HKD.shape
    weight = own.get("project_in.weight")
    heads = options.get("heads", books if books > 1 or weight is None else weight.shape[0] // code_dim)
    found = {
        "dim": heads * code_dim if weight is None else weight.shape[1],
        "codebook_size": size,
        "codebook_dim": code_dim,
        "heads": heads,
        "separate_codebook_per_head": books > 1,
        "kmeans_init": not own.get("_codebook.initted", True),
    }
    vq = kind(**{**found, **options}).to(codes_HKD)
    if len(vq.codebooks) != books:
        raise ValueError(f"{books} codebooks were found, but the options given ask for {len(vq.codebooks)}: {options}")
    if weight is not None:
        for way, projection in (("in", vq.project_in), ("out", vq.project_out)):
            projection.load_state_dict({part: own[f"project_{way}.{part}"] for part in ("weight", "bias")})
    if not found["kmeans_init"]:
        for h in range(books):
            sums_KD, counts_K = (None if part is None else part[h] for part in (sums_HKD, counts_HK))
            fill(vq.codebook_of(h), codes_HKD[h], sums_KD, counts_K)
    return vq


def _settings(module: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """The settings of a `VectorQuantize` as arguments of KohonenVQ; one that has no counterpart is refused by name."""
    vq: Any = module
    book = vq._codebook
    sampling = book.gumbel_sample.keywords
    has_no_counterpart = {
        "layernorm_after_project_in": isinstance(vq.project_in, nn.Sequential),
        "commitment_use_cross_entropy_loss": vq.commitment_use_cross_entropy_loss,
        "codebook_diversity_loss_weight": vq.codebook_diversity_loss_weight,
        "straight_through": sampling["straight_through"],
        "directional_reparam": getattr(vq, "directional_reparam", False),
        "affine_param": book.affine_param,
        "vq_bridge": getattr(book, "vq_bridge", None),
        "manual_ema_update": book.manual_ema_update and not shares_its_codebook(vq),
        "in_place_codebook_optimizer": vq.in_place_codebook_optimizer,
        "sync_update_v": vq.sync_update_v,
    }
    for name, value in has_no_counterpart.items():
        if value:
            refuse_arguments("VectorQuantize", {name: value}, {**ADVICE, "directional_reparam": FOLLOW_THE_OUTPUT})
    if not getattr(vq, "return_zeros_for_masked_padding", True):
        refuse_arguments("VectorQuantize", {"return_zeros_for_masked_padding": False}, ADVICE)
    if not getattr(vq, "route_gradients_to_input", True):
        raise TypeError(f"VectorQuantize: route_gradients_to_input=False is not supported; {FOLLOW_THE_OUTPUT}")
    if 0 < book.threshold_ema_dead_code < 1 and "threshold_ema_dead_code" not in options:
        raise TypeError(
            f"VectorQuantize: threshold_ema_dead_code={book.threshold_ema_dead_code!r} is a count there and a share of "
            "the mean count here: say which, such as threshold_ema_dead_code=0.1 (0: never revive)"
        )
    found = {
        "heads": vq.heads,
        "eps": vq.eps,
        "freeze_codebook": vq.freeze_codebook or (vq.learnable_codebook and not book.embed.requires_grad),
        "kmeans_iters": book.kmeans_iters,
        "use_cosine_sim": vq.use_cosine_sim,
        "channel_last": vq.channel_last,
        "accept_image_fmap": vq.accept_image_fmap,
        "accept_3d_fmap": vq.accept_3d_fmap,
        "commitment_weight": vq.commitment_weight,
        "rotation_trick": vq.rotation_trick,
        "orthogonal_reg_weight": vq.orthogonal_reg_weight,
        "orthogonal_reg_active_codes_only": vq.orthogonal_reg_active_codes_only,
        "orthogonal_reg_max_codes": vq.orthogonal_reg_max_codes,
        "stochastic_sample_codes": sampling["stochastic"],
        "sample_codebook_temp": book.sample_codebook_temp,
    }
    # Codes that followed the gradient now follow Kohonen's rule; codes that followed nothing still do.
    return (
        found
        if vq.learnable_codebook
        else {
            **found,
            "decay": book.decay,
            "ema_update": book.ema_update,
            "threshold_ema_dead_code": book.threshold_ema_dead_code,
        }
    )


def replace(module: nn.Module, options: Options) -> VectorQuantizeReplacement:
    kind = SharedReplacement if shares_its_codebook(module) else VectorQuantizeReplacement
    vq = convert_vector_quantize(module, kind, options)
    # The parameters themselves, not copies: an optimizer may know them already.
    vq.project_in, vq.project_out = module.get_submodule("project_in"), module.get_submodule("project_out")
    theirs: Any = module
    vq.remember(module, theirs._codebook.embed)
    return vq


def matches(module: nn.Module) -> bool:
    return package(module) == "vector_quantize_pytorch" and type(module).__name__ == "VectorQuantize"


def shares_its_codebook(layer: Any) -> bool:
    """Whether this is a layer of ResidualVQ(shared_codebook=True), which sets both."""
    return bool(layer._codebook.manual_ema_update and layer.manual_in_place_optimizer_update)


CARRY_OVER = "then set `codebook` of each of its `quantizers` to that of each of these `layers`"
RESIDUAL_OPTIONS = {
    "diveq": f"use topovq.ResidualVQ(..., diveq=True), {CARRY_OVER}",
    "implicit_neural_codebook": RESIDUAL_ADVICE["implicit_neural_codebook"],
}


def check_owner(module: nn.Module) -> None:
    """Refuse modules of vector-quantize-pytorch that do with their layers what KohonenVQ cannot."""
    if package(module) != "vector_quantize_pytorch":
        return
    name = type(module).__name__
    if name == "ResidualVQ":
        asked = {option: getattr(module, option, None) for option in RESIDUAL_OPTIONS}
        refuse_arguments("replacing the layers of ResidualVQ", asked, RESIDUAL_OPTIONS)
    elif name in ("Sequential", "RandomProjectionQuantizer") and any(map(matches, module.modules())):
        raise TypeError(f"a VectorQuantize inside vector_quantize_pytorch's {name} is used in ways KohonenVQ cannot be")


def share_again(module: nn.Module) -> None:
    """Let the layers of ResidualVQ(shared_codebook=True), which were exchanged one by one, share a codebook again."""
    if package(module) == "vector_quantize_pytorch" and getattr(module, "shared_codebook", False):
        first, *rest = module.get_submodule("layers").children()
        name = "codebooks" if isinstance(first, KohonenVQ) else "_codebook"
        for layer in rest:
            setattr(layer, name, getattr(first, name))


LIBRARIES = (
    Library("VectorQuantize of vector-quantize-pytorch", "VectorQuantize", matches, replace, check_owner, share_again),
)
