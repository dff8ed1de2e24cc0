"""The k closest codes of each vector, as vector-quantize-pytorch's `topk` gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from topovq.ops.candidates import nearest_k
from topovq.quantizers.results import Quantized
from topovq.quantizers.rotation import rotate_to

if TYPE_CHECKING:
    from topovq.quantizers.layer import Layer


def closest(vq: Layer, x: Tensor, mask: Tensor | None, lens: Tensor | None, k: int) -> Quantized:
    """Quantized with one more axis for the k candidates, closest first, and a loss for each; no code moves.

    quantized  [..., k, C] ([B, C, ..., k] where channels come first); indices and loss [..., k]: -1 and 0 where masked
    """
    if vq.heads > 1:
        raise ValueError(f"topk={k!r} needs heads=1, got heads={vq.heads}")
    if vq.training and vq.extras.stochastic_sample_codes:
        raise ValueError(f"topk={k!r} is the {k} closest codes, stochastic_sample_codes=True draws them: leave one out")
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"topk={k!r} must be an int of at least 1")
    vq._check_input(x)
    z = vq._channels_to_last(x)
    mask = vq._checked_mask(mask, lens, z)
    z = z if mask is None else torch.where(mask[..., None], z, 0)
    book = vq.codebook_of(0)
    book.settle()
    x_ND = vq.project_in(z).reshape(-1, vq.codebook_dim)
    if book.unit_length:
        x_ND = nn.functional.normalize(x_ND, dim=1)
    k = min(k, book.size)
    index_NK = book.search(x_ND)[:, None] if k == 1 else nearest_k(x_ND, book.codes, k, book.metric)
    x_NKD = x_ND[:, None].expand(-1, k, -1)
    codes_NKD = book.codes.detach()[index_NK].to(x_ND.dtype)
    error_NK = (x_NKD - codes_NKD).square().mean(-1)
    if vq.rotation_trick:
        codes_NKD = rotate_to(x_NKD.flatten(0, 1), codes_NKD.flatten(0, 1)).view_as(codes_NKD)
    else:
        codes_NKD = codes_NKD + (x_NKD - x_NKD.detach())
    shape = (*z.shape[:-1], k)
    quantized = vq.project_out(codes_NKD.reshape(*shape, -1))
    indices, loss = index_NK.reshape(shape), vq.commitment_weight * error_NK.reshape(shape)
    if mask is not None:
        keep = mask[..., None]
        quantized = torch.where(keep[..., None], quantized, 0)
        indices, loss = torch.where(keep, indices, -1), torch.where(keep, loss, 0)
    return Quantized(vq._channels_back(quantized), indices, loss)
