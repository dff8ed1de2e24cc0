"""Codebooks out of other libraries' layers and checkpoints.

Legend: K codes, D dimensions, H codebooks (more than one where every head has its own).
What each layer keeps, below whatever prefix the model gave it:
    vector-quantize-pytorch  _codebook.embed [H, K, D], .embed_avg [H, K, D], .cluster_size [H, K], .initted
    Kohonen-VAE's authors    _w [K, D], _ema_w [K, D], _ema_cluster_size [K], counter
    rosinality's VQ-VAE-2    embed [D, K], embed_avg [D, K], cluster_size [K]
The codes, their running sums and their running counts are w, m and N of codebook.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq.codebook import Codebook
from topovq.quantizers.arguments import ADVICE, refuse_arguments
from topovq.quantizers.kohonen import KohonenVQ


class _Layout(NamedTuple):
    """How a library names the state of its quantizer."""

    library: str
    codes: str
    sums: str
    counts: str


VECTOR_QUANTIZE = _Layout("vector-quantize-pytorch", "_codebook.embed", "_codebook.embed_avg", "_codebook.cluster_size")
KOHONEN_VAE = _Layout("the Kohonen-VAE", "_w", "_ema_w", "_ema_cluster_size")
ROSINALITY = _Layout("rosinality's VQ-VAE-2", "embed", "embed_avg", "cluster_size")

State = Mapping[str, Tensor]


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


def convert_vector_quantize(module: nn.Module, kind: type[KohonenVQ], options: dict[str, Any]) -> KohonenVQ:
    """A `kind` of KohonenVQ with the state, the settings and the mode of a `VectorQuantize`."""
    options = {**_settings(module, options), **options}
    return _from_vector_quantize_state(module.state_dict(), "", kind, options).train(module.training)


def from_kohonen_vae(state: State, *, prefix: str | None = None, **options: Any) -> KohonenVQ:
    """A KohonenVQ with the codes, statistics and step of the Kohonen-VAE authors' layer.

    Their state dict knows neither grid nor neighborhood: give them as `options`.
    """
    own = _below(state, KOHONEN_VAE, prefix)
    codes_KD, sums_KD, counts_K = _statistics(own, KOHONEN_VAE, "[K, D]")
    vq = with_codes(codes_KD, sums_KD, counts_K, options)
    if "counter" in own:
        vq.codebook_of(0).step.fill_(int(own["counter"]))
    return vq


def from_rosinality(state: State, *, prefix: str | None = None, **options: Any) -> KohonenVQ:
    """A KohonenVQ with the codes and statistics of one quantizer of rosinality's VQ-VAE-2, say prefix="quantize_t"."""
    own = _below(state, ROSINALITY, prefix)
    codes_DK, sums_DK, counts_K = _statistics(own, ROSINALITY, "[D, K]")
    return with_codes(codes_DK.T, None if sums_DK is None else sums_DK.T, counts_K, options)


def _below(state: State, layout: _Layout, prefix: str | None) -> dict[str, Tensor]:
    """What the state dict holds below the prefix of the (one, or the given) quantizer, named without the prefix."""
    found = [key.removesuffix(layout.codes) for key in state if f".{key}".endswith(f".{layout.codes}")]
    if prefix is None:
        if len(found) != 1:
            raise ValueError(
                f"the state dict holds {len(found)} quantizers of {layout.library}: "
                + (f"give one of prefix={', '.join(map(repr, found))}" if found else _nothing_found(state, layout))
            )
        prefix = found[0]
    elif prefix:
        prefix = prefix.removesuffix(".") + "."
    if prefix not in found:
        held = f"quantizers are at {', '.join(map(repr, found))}" if found else _nothing_found(state, layout)
        raise ValueError(f"there is no {prefix + layout.codes!r} in the state dict; {held}")
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _nothing_found(state: State, layout: _Layout) -> str:
    return f"no key ends in {layout.codes!r}; found {_listed(list(state))}"


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"


def _statistics(own: State, layout: _Layout, shape: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(codes, sums, counts) as they are stored; sums and counts are None where there are none."""
    codes = own[layout.codes]
    axes = shape.count(",") + 1
    if codes.ndim != axes:
        raise ValueError(f"{layout.codes!r} has shape {tuple(codes.shape)}, but {layout.library} keeps it as {shape}")
    missing = [name for name in (layout.sums, layout.counts) if name not in own]
    if len(missing) == 2:
        return codes, None, None
    if missing:
        raise ValueError(f"{missing[0]!r} is missing beside {layout.codes!r}; found {_listed(sorted(own))}")
    sums, counts = own[layout.sums], own[layout.counts]
    expected = tuple(n for n, name in zip(codes.shape, shape.strip("[]").split(", ")) if name != "D")
    if sums.shape != codes.shape or tuple(counts.shape) != expected:
        raise ValueError(
            f"{layout.sums!r} of shape {tuple(sums.shape)} and {layout.counts!r} of shape {tuple(counts.shape)} do not "
            f"fit {layout.codes!r} of shape {tuple(codes.shape)}: expected {tuple(codes.shape)} and {expected}"
        )
    return codes, sums, counts


def with_codes(codes_KD: Tensor, sums_KD: Tensor | None, counts_K: Tensor | None, options: dict[str, Any]) -> KohonenVQ:
    """A KohonenVQ that goes on from these codes and, where there are any, these sums and counts."""
    size, dim = codes_KD.shape
    vq = KohonenVQ(**{"dim": dim, "codebook_size": size, **options}).to(codes_KD)
    _fill(vq.codebook_of(0), codes_KD, sums_KD, counts_K)
    return vq


@torch.no_grad()
def _fill(book: Codebook, codes_KD: Tensor, sums_KD: Tensor | None, counts_K: Tensor | None) -> None:
    """Put codes and statistics in place.

    Sums from which the next update would not find these codes again (they were assigned, or learned by gradient) give
    way to sums from which it does.
    """
    book.set_codes(codes_KD)
    if book.learnable or sums_KD is None or counts_K is None or not counts_K.any():
        return
    sums_KD, counts_K = sums_KD.to(book.sums), counts_K.to(book.counts)
    total = counts_K.sum()
    divisor_K1 = ((counts_K + book.eps) / (total + book.size * book.eps) * total)[:, None]
    implied_KD = sums_KD / divisor_K1
    if book.metric == "cosine":
        implied_KD = F.normalize(implied_KD, dim=1)
    agrees_K1 = torch.isclose(implied_KD, book.codes, rtol=1e-2).all(1, keepdim=True)
    book.sums.copy_(torch.where(agrees_K1, sums_KD, book.codes * divisor_K1))
    book.counts.copy_(counts_K)


def _from_vector_quantize_state(
    state: State, prefix: str | None, kind: type[KohonenVQ], options: dict[str, Any]
) -> KohonenVQ:
    own = _below(state, VECTOR_QUANTIZE, prefix)
    codes_HKD, sums_HKD, counts_HK = _statistics(own, VECTOR_QUANTIZE, "[H, K, D]")
    projections = [f"project_{way}.{part}" for way in ("in", "out") for part in ("weight", "bias")]
    unknown = sorted(own.keys() - {*VECTOR_QUANTIZE[1:], "_codebook.initted", *projections})
    if unknown:
        raise ValueError(
            f"{_listed(unknown)} have no counterpart in KohonenVQ (layernorm_after_project_in, affine_param and "
            "vq_bridge leave such tensors)"
        )
    missing = [name for name in projections if name not in own]
    if missing and missing != projections:
        raise ValueError(f"{_listed(missing)} are missing beside the other projections; found {_listed(sorted(own))}")
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
            _fill(vq.codebook_of(h), codes_HKD[h], sums_KD, counts_K)
    return vq


def _settings(module: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """The settings of a `VectorQuantize` as arguments of KohonenVQ; one that has no counterpart is refused by name."""
    vq: Any = module
    book = vq._codebook
    sampling = book.gumbel_sample.keywords
    has_no_counterpart = {
        "layernorm_after_project_in": isinstance(vq.project_in, nn.Sequential),
        "commitment_use_cross_entropy_loss": vq.commitment_use_cross_entropy_loss,
        "orthogonal_reg_weight": vq.orthogonal_reg_weight,
        "codebook_diversity_loss_weight": vq.codebook_diversity_loss_weight,
        "stochastic_sample_codes": sampling["stochastic"],
        "straight_through": sampling["straight_through"],
        "directional_reparam": getattr(vq, "directional_reparam", False),
        "affine_param": book.affine_param,
        "vq_bridge": getattr(book, "vq_bridge", None),
        "manual_ema_update": book.manual_ema_update,
        "in_place_codebook_optimizer": vq.in_place_codebook_optimizer,
        "sync_update_v": vq.sync_update_v,
    }
    for name, value in has_no_counterpart.items():
        if value:
            refuse_arguments("VectorQuantize", {name: value}, ADVICE)
    for name in ("return_zeros_for_masked_padding", "route_gradients_to_input"):
        if not getattr(vq, name, True):
            refuse_arguments("VectorQuantize", {name: False}, ADVICE)
    if book.threshold_ema_dead_code and "threshold_ema_dead_code" not in options:
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
    }
    # Codes that followed the gradient now follow Kohonen's rule; codes that followed nothing still do.
    return found if vq.learnable_codebook else {**found, "decay": book.decay, "ema_update": book.ema_update}
