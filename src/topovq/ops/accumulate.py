"""accumulate: the sum and the count of the vectors that chose each code, without one-hots.

Legend: N vectors, K codes, D dimensions.
    S_k = sum of x_i with index_i = k,   c_k = number of them
A negative index leaves its vector out, whatever the vector holds (NaN included). On the CPU the result is
deterministic; on CUDA it is under torch.use_deterministic_algorithms(True).
"""

from __future__ import annotations

import torch
from torch import Tensor

from topovq.ops.direct import plain

ROWS = 65_536  # vectors converted at a time on the CPU


def accumulate(x_ND: Tensor, index_N: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
    """(sums [K, D], counts [K]), float32 (float64 for float64 vectors)."""
    if x_ND.ndim != 2 or index_N.shape != x_ND.shape[:1]:
        raise ValueError(
            f"vectors of shape {tuple(x_ND.shape)} and indices of shape {tuple(index_N.shape)} do not fit: "
            "expected [N, D] and [N]"
        )
    operation = _compute if plain(x_ND) else _accumulate
    return operation(x_ND.detach(), index_N, num_codes)


def accumulate_reference(x_ND: Tensor, index_N: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
    """The definition, with the N x K one-hot matrix: for tests."""
    kept = index_N >= 0
    one_hot_NK = torch.nn.functional.one_hot(index_N[kept], num_codes).to(x_ND.dtype)
    return one_hot_NK.T @ x_ND[kept], one_hot_NK.sum(0)


def _compute(x_ND: Tensor, index_N: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    if x_ND.is_cuda and dtype == torch.float32:
        from topovq.ops.triton.accumulate import accumulate_triton

        return accumulate_triton(x_ND, index_N, num_codes, torch.are_deterministic_algorithms_enabled())
    # Vectors that are left out go to one more row, which is then dropped: no data-dependent shapes.
    place_N = torch.where(index_N < 0, num_codes, index_N)
    sums = torch.zeros(num_codes + 1, x_ND.shape[1], dtype=dtype, device=x_ND.device)
    for start in range(0, x_ND.shape[0], ROWS):
        sums.index_add_(0, place_N[start : start + ROWS], x_ND[start : start + ROWS].to(dtype))
    counts = torch.bincount(place_N, minlength=num_codes + 1).to(dtype)
    return sums[:num_codes].clone(), counts[:num_codes].clone()


_accumulate = torch.library.custom_op("topovq::accumulate", _compute, mutates_args=())


@_accumulate.register_fake
def _(x_ND: Tensor, index_N: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    return x_ND.new_empty(num_codes, x_ND.shape[1], dtype=dtype), x_ND.new_empty(num_codes, dtype=dtype)
