"""Codes that are not finite or lie far outside the data: which they are, in words, and how they come back.

Legend: K codes w, D dimensions, M of them to be repaired.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topovq import metrics
from topovq.codebook import Codebook

NAMED = 8  # codes that a sentence lists
ROWS = 256  # codes that are repaired at a time


def advice(books: Sequence[Codebook]) -> str:
    """What is wrong with which codes, and what to do; empty where nothing is."""
    found: list[str] = []
    several = False
    for number, book in enumerate(books):
        stray_K, finite_K = _stray(book), book.codes.detach().isfinite().all(1)
        where = f" of codebook {number}" if len(books) > 1 else ""
        for which_K, what in ((stray_K & ~finite_K, "not finite"), (stray_K & finite_K, "far outside the data")):
            places = which_K.nonzero()[:, 0].tolist()
            if places:
                several = several or bool(found) or len(places) > 1
                found.append(f"{_listed(places)}{where} {'is' if len(places) == 1 else 'are'} {what}")
    them = "them between their" if several else "it between its"
    return f"{'; '.join(found)}: repair() puts {them} neighbors on the map" if found else ""


@torch.no_grad()
def repair(book: Codebook) -> int:
    """Put stray codes between their neighbors on the map, with statistics to match; how many there were.

    A code becomes the mean of the sound ones, weighted by exp(-d^2) with d their distance on the map.
    """
    bad_K = _stray(book) & ~(book.frozen & book.codes.isfinite().all(1))
    if not book.learnable:
        bad_K |= ~(book.sums.isfinite().all(1) & book.counts.isfinite())
    sound, places_M = (~bad_K).nonzero()[:, 0], bad_K.nonzero()[:, 0]
    if not len(places_M):
        return 0
    if not len(sound):
        raise ValueError(f"none of the {book.size} codes can be used: load a checkpoint, or start anew")
    grid = book.neighborhood.grid
    for places in torch.split(places_M, ROWS):
        apart = grid.distance(places[:, None], sound[None, :])
        weights = torch.softmax(-apart.square(), 1).to(book.codes)
        book.codes[places] = weights @ book.codes[sound]
    if book.unit_length:
        book.codes[places_M] = torch.nn.functional.normalize(book.codes[places_M], dim=1)
    book.hits[places_M] = 0
    for running_K in [getattr(book, name, None) for name in ("counts", "received")]:
        if running_K is not None:
            running_K[places_M] = running_K[sound].mean()
    if not book.learnable:
        book.sums[places_M] = book.codes[places_M] * book.divisor()[places_M, None]
    return len(places_M)


def _stray(book: Codebook) -> Tensor:
    return metrics.stray(book.codes.detach(), metrics.used_lately(book.idle, book.memory))


def _listed(places: list[int]) -> str:
    """ "code 3", "codes 3 and 5", "codes 1, 2, 3, 4, 5, 6, 7, 8 and 20 more"."""
    names = [str(place) for place in places[:NAMED]]
    if len(places) > NAMED:
        names.append(f"{len(places) - NAMED:,} more")
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{'code' if len(places) == 1 else 'codes'} {listed}"
