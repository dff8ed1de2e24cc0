"""Codes and statistics out of other libraries' state dicts.

Legend: K codes, D dimensions. The codes, their running sums and their running counts are w, m and N of codebook.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from topovq.codebook import Codebook
from topovq.quantizers.kohonen import KohonenVQ

State = Mapping[str, Tensor]


class Layout(NamedTuple):
    """How a library names the state of its quantizer."""

    library: str
    codes: str
    sums: str
    counts: str


def below(state: State, layout: Layout, prefix: str | None) -> dict[str, Tensor]:
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


def _nothing_found(state: State, layout: Layout) -> str:
    return f"no key ends in {layout.codes!r}; found {listed(list(state))}"


def listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"


def statistics(own: State, layout: Layout, shape: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(codes, sums, counts) as they are stored; sums and counts are None where there are none."""
    codes = own[layout.codes]
    axes = shape.count(",") + 1
    if codes.ndim != axes:
        raise ValueError(f"{layout.codes!r} has shape {tuple(codes.shape)}, but {layout.library} keeps it as {shape}")
    missing = [name for name in (layout.sums, layout.counts) if name not in own]
    if len(missing) == 2:
        return codes, None, None
    if missing:
        raise ValueError(f"{missing[0]!r} is missing beside {layout.codes!r}; found {listed(sorted(own))}")
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
    fill(vq.codebook_of(0), codes_KD, sums_KD, counts_K)
    return vq


@torch.no_grad()
def fill(book: Codebook, codes_KD: Tensor, sums_KD: Tensor | None, counts_K: Tensor | None) -> None:
    """Put codes and statistics in place."""
    book.set_codes(codes_KD)
    if book.learnable or sums_KD is None or counts_K is None or not counts_K.any():
        return
    sums_KD, counts_K = sums_KD.to(book.sums), counts_K.to(book.counts)
    divisor_K = smoothed(counts_K, book.eps) if book.update_empty and not book.ride else counts_K
    book.sums.copy_(agreeing_sums(book.codes, sums_KD, divisor_K, book.unit_length))
    book.counts.copy_(counts_K)


def smoothed(counts_K: Tensor, eps: float) -> Tensor:
    """What moving averages divide the sums by where unused codes decay: codebook.py's N~."""
    total = counts_K.sum()
    return (counts_K + eps) / (total + counts_K.numel() * eps) * total


def agreeing_sums(codes_KD: Tensor, sums_KD: Tensor, divisor_K: Tensor, unit_length: bool) -> Tensor:
    """Sums [K, D] from which an update that divides by these counts finds the codes again.

    They are the given ones, except where those do not agree: the codes were assigned or learned by gradient, or their
    counts are so small that the other rule's smoothing decided where they are.
    """
    implied_KD = sums_KD / divisor_K[:, None]
    if unit_length:
        implied_KD = nn.functional.normalize(implied_KD, dim=1)
    agrees_K1 = torch.isclose(implied_KD, codes_KD, rtol=1e-2).all(1, keepdim=True)
    return torch.where(agrees_K1, sums_KD, codes_KD * divisor_K[:, None])


def export_statistics(book: Codebook) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [K, D], sums [K, D], counts [K]) as another library's moving averages go on from them."""
    codes_KD = book.codes.detach()
    if book.learnable:
        return codes_KD, codes_KD, torch.ones_like(codes_KD[:, 0])
    sums_KD = agreeing_sums(codes_KD, book.sums, smoothed(book.counts, book.eps), book.unit_length)
    return codes_KD, sums_KD, book.counts
