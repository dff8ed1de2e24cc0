"""bound: which vectors take part in learning and in the loss, so that one of them cannot spoil a codebook.

Legend: N vectors x, K codes w, D dimensions; the length of a vector is the sum of |x| over its dimensions here.
A vector counts where its length is a number whose square is finite: NaN and infinity leave it out, and so do numbers
that are too large. In training it must also be at most FAR times as long as the longer of
    the length that a quarter of the batch's vectors exceed, and
    the longest code.
Both are sought among SAMPLE vectors and codes (search.py), without vectors of zeros, which padding is. So a batch whose
vectors are all far away is learned from, and a vector that is far from all others is not. A batch of one vector has no
others (`alone`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from topovq.ops.search import sample_of

FAR = 1000.0


def counted(x_ND: Tensor, codes_KD: Tensor | None, learns: bool) -> Tensor:
    """Which vectors count, bool [N]; `codes_KD` is None where the codes are still to be made of the vectors."""
    length_N = lengths(x_ND.detach())
    limit = limit_of(length_N, codes_KD) if learns and x_ND.shape[0] else largest(length_N.dtype)
    return length_N <= limit  # false for NaN


def alone(x_1D: Tensor, codes_KD: Tensor, settled: Tensor) -> tuple[Tensor, Tensor]:
    """(whether a batch's only vector may be learned from, bool [1]; whether its length alone forbids it, int64, 0-dim).

    There are no others to compare it with. The longest code stands in for them, once codes are `settled` (bool, 0-dim).
    """
    length_1 = lengths(x_1D.detach())
    near_1 = ~settled | (length_1 <= FAR * _finite(lengths(codes_KD.detach())).amax())
    return near_1, (~near_1 & (length_1 <= largest(length_1.dtype))).sum()


def limit_of(length_N: Tensor, codes_KD: Tensor | None) -> Tensor:
    """How long a vector may be in a batch of these lengths to be learned from, 0-dim."""
    some_S = _finite(length_N[sample_of(length_N.shape[0], length_N.device)])
    number = (some_S > 0).sum()
    above = torch.minimum((number + 3) // 4, number - 1).clamp(min=0)
    usual = some_S.sort(descending=True).values[above[None]][0]  # by a list of one: a lone index would be read
    if codes_KD is not None:
        some_SD = codes_KD.detach()[sample_of(codes_KD.shape[0], codes_KD.device)]
        usual = torch.maximum(usual, _finite(lengths(some_SD)).amax().to(usual.dtype))
    return (FAR * usual).clamp(max=largest(usual.dtype))


def lengths(x_ND: Tensor) -> Tensor:
    """[N], float32 at least."""
    return x_ND.to(torch.promote_types(x_ND.dtype, torch.float32)).abs().sum(1)


def largest(dtype: torch.dtype) -> float:
    """The largest length whose square is finite."""
    return float(torch.finfo(dtype).max ** 0.5)


def _finite(length_S: Tensor) -> Tensor:
    return torch.where(length_S.isfinite(), length_S, 0)
