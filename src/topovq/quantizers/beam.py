"""Beam search through quantizers in a row: the tokens of a vector are chosen together instead of one after the other.

Legend: N vectors, L quantizers, W beams, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from topovq.ops.candidates import nearest_k
from topovq.quantizers.kohonen import KohonenVQ


@torch.no_grad()
def beam_search(
    layers: Sequence[KohonenVQ],
    codes: Sequence[Tensor],
    x_ND: Tensor,
    beams: int,
    weights: Sequence[float],
    last: Tensor | None = None,
) -> Tensor:
    """Tokens int64 [N, L] with the lowest sum over quantizers of weight * mean (what is left - its code)^2.

    Each quantizer offers its `beams` closest codes to each of the `beams` best rows so far. With `last` (0-dim) the sum
    ends there, and later tokens mean nothing. `codes` are those of the layers, [K, D] each.
    """
    n = x_ND.shape[0]
    left_NWD, cost_NW = x_ND[:, None], x_ND.new_zeros(n, 1)
    tokens_NWL = torch.zeros(n, 1, 0, dtype=torch.int64, device=x_ND.device)
    found_NL = torch.zeros(n, len(layers), dtype=torch.int64, device=x_ND.device)
    for place, (layer, codes_KD, weight) in enumerate(zip(layers, codes, weights)):
        book = layer.codebook_of(0)
        width, offers = left_NWD.shape[1], min(beams, book.size)
        flat_MD = layer.project_in(left_NWD.flatten(0, 1))
        flat_MD = F.normalize(flat_MD, dim=1) if book.unit_length else flat_MD
        if offers == 1:
            index_MK = book.search(flat_MD, codes_KD)[:, None]
        else:
            index_MK = nearest_k(flat_MD, codes_KD, offers, book.metric)
        codes_MKD = codes_KD[index_MK].to(flat_MD.dtype)
        error_MK = (flat_MD[:, None] - codes_MKD).square().mean(-1)

        cost_NC = (cost_NW[:, :, None] + weight * error_MK.view(n, width, offers)).flatten(1)
        left_NCD = (left_NWD[:, :, None] - layer.project_out(codes_MKD).view(n, width, offers, -1)).flatten(1, 2)
        tokens_NCL = tokens_NWL[:, :, None].expand(-1, -1, offers, -1).flatten(1, 2)
        tokens_NCL = torch.cat([tokens_NCL, index_MK.view(n, -1, 1)], 2)
        cost_NW, kept_NW = cost_NC.topk(min(beams, cost_NC.shape[1]), largest=False)
        left_NWD = left_NCD.gather(1, kept_NW[..., None].expand(-1, -1, left_NCD.shape[2]))
        tokens_NWL = tokens_NCL.gather(1, kept_NW[..., None].expand(-1, -1, place + 1))

        best_NL = F.pad(tokens_NWL[:, 0], (0, len(layers) - place - 1))
        found_NL = best_NL if last is None else torch.where(last == place, best_NL, found_NL)
    return found_NL
