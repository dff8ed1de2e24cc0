"""A model whose quantizers become Kohonen ones in one line, and codebooks out of other libraries' checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from topovq.quantizers.base import Quantized
from topovq.quantizers.convert import (
    convert_vector_quantize,
    from_kohonen_vae,
    from_rosinality,
    from_vector_quantize_pytorch,
    with_codes,
)
from topovq.quantizers.kohonen import KohonenVQ

__all__ = [
    "DiffusersReplacement",
    "VectorQuantizeReplacement",
    "from_kohonen_vae",
    "from_rosinality",
    "from_vector_quantize_pytorch",
    "replace_quantizers",
]


def replace_quantizers(model: nn.Module, **options: Any) -> list[str]:
    """Turn every quantizer inside `model` into a Kohonen one, in place; returns their names, such as ["vq"].

    Replaced are vector-quantize-pytorch's `VectorQuantize` (also inside its `ResidualVQ`) and diffusers'
    `VectorQuantizer`. Codes, statistics, projections, settings, device, type and mode are kept, so the model gives the
    same tokens as before; from now on its codes learn by Kohonen's rule. `options` are KohonenVQ's arguments and come
    before the settings that were found. Either all are replaced, or an error says why one cannot be.
    """
    if _is_vector_quantize(model) or _is_diffusers(model):
        raise ValueError(
            f"the model is itself a {type(model).__name__}, which cannot be replaced in place: give the module that "
            "holds it, or use from_vector_quantize_pytorch(module)"
        )
    made: dict[nn.Module, nn.Module] = {}
    places = []
    for path, parent in model.named_modules():
        _check_owner(parent)
        for name, child in parent._modules.items():
            if child is None or not (_is_vector_quantize(child) or _is_diffusers(child)):
                continue
            places.append((f"{path}.{name}".removeprefix("."), parent, name, child))
            if child not in made:  # one module may be in several places
                try:
                    made[child] = _replacement(child, options)
                except (TypeError, ValueError) as error:
                    error.add_note(f"This is about {places[-1][0]!r}; no quantizer was replaced.")
                    raise
    if not places:
        raise ValueError(
            f"{type(model).__name__} holds no quantizer to replace: looked for VectorQuantize of "
            f"vector-quantize-pytorch and VectorQuantizer of diffusers in its {len(list(model.modules()))} modules "
            "(subclasses are left alone)"
        )
    for _, parent, name, child in places:
        setattr(parent, name, made[child])
    return [path for path, *_ in places]


def _replacement(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    if _is_diffusers(module):
        return DiffusersReplacement(module, options).train(module.training)
    vq = convert_vector_quantize(module, VectorQuantizeReplacement, options)
    # The parameters themselves, not copies: an optimizer may know them already.
    vq.project_in, vq.project_out = module.get_submodule("project_in"), module.get_submodule("project_out")
    return vq


class VectorQuantizeReplacement(KohonenVQ):
    """KohonenVQ as vector-quantize-pytorch's own modules use a layer: arguments of None, codes at `_codebook.embed`."""

    def forward(self, x: Tensor, *args: Any, **arguments: Any) -> Quantized:
        return super().forward(x, *args, **{name: value for name, value in arguments.items() if value is not None})

    @property
    def _codebook(self) -> SimpleNamespace:
        return SimpleNamespace(embed=torch.stack([book.codes for book in self._books()]))


class DiffusersReplacement(nn.Module):
    """KohonenVQ (`.vq`) behind the interface of diffusers' VectorQuantizer.

    The loss is the commitment term alone: the codebook term of theirs moved the codes, which now Kohonen's rule does.
    """

    like: Tensor

    def __init__(self, theirs: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        found: Any = theirs
        if found.remap is not None:
            raise TypeError(f"VectorQuantizer: remap={found.remap!r} is not supported; replace it without a remap")
        weight: Tensor = found.embedding.weight
        settings = {
            "accept_image_fmap": True,
            # "legacy" has beta on the codebook term, where it does not reach the encoder.
            "commitment_weight": 1.0 if found.legacy else found.beta,
            "freeze_codebook": not weight.requires_grad,
        }
        self.vq = with_codes(weight.detach(), None, None, {**settings, **options})
        self.n_e: int = found.n_e
        self.vq_embed_dim: int = found.vq_embed_dim
        self.sane_index_shape: bool = found.sane_index_shape
        # Follows .half() and the like, which the codes do not.
        self.register_buffer("like", weight.new_empty(0), persistent=False)

    def forward(self, z_BCHW: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, None, Tensor]]:
        """(quantized [B, C, H, W], loss, (perplexity, None, tokens)): tokens flat, or [B, H, W] if sane_index_shape."""
        quantized, tokens_BHW, loss = self.vq(z_BCHW)
        tokens = tokens_BHW if self.sane_index_shape else tokens_BHW.flatten()
        return quantized.contiguous(), loss, (self.vq.perplexity, None, tokens)

    def get_codebook_entry(self, indices: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """Codes [..., C] of tokens; with shape = (B, H, W, C) as a feature map [B, C, H, W]."""
        codes = self.vq.get_codes_from_indices(indices.flatten()).to(self.like.dtype)
        if shape is None:
            return codes.view(*indices.shape, self.vq_embed_dim)
        return codes.view(shape).permute(0, 3, 1, 2).contiguous()


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _is_vector_quantize(module: nn.Module) -> bool:
    return _package(module) == "vector_quantize_pytorch" and type(module).__name__ == "VectorQuantize"


def _is_diffusers(module: nn.Module) -> bool:
    return _package(module) == "diffusers" and type(module).__name__ == "VectorQuantizer"


def _check_owner(module: nn.Module) -> None:
    """Refuse modules of vector-quantize-pytorch that do with their layers what KohonenVQ cannot."""
    if _package(module) != "vector_quantize_pytorch":
        return
    name = type(module).__name__
    if name == "ResidualVQ":
        for option in ("shared_codebook", "implicit_neural_codebook", "diveq", "beam_size"):
            value = getattr(module, option, None)
            if value:
                raise TypeError(f"ResidualVQ: {option}={value!r} has no counterpart in KohonenVQ; leave it out")
    elif name in ("Sequential", "RandomProjectionQuantizer") and any(map(_is_vector_quantize, module.modules())):
        raise TypeError(f"a VectorQuantize inside vector_quantize_pytorch's {name} is used in ways KohonenVQ cannot be")
