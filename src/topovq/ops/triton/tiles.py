"""Which tiles a search has, and which way it goes: what was fastest of those tried on one H200."""

from __future__ import annotations

from typing import NamedTuple

from topovq.ops.triton.accumulate import cdiv, power_of_2

BUSY = 264  # programs of large tiles that run at the same time: two on each processor of an H200
LEAST_TILES = 8  # of codes in a share
LARGE = 2**33  # vectors x codes x dimensions from which on one product and a proof are cheaper than three products
PROVEN_DIMENSIONS = 64
PROVEN_CODES = 2049, 512  # at least so many; from 65 dimensions on, where few codes have no slots of their own
FOLDED, FOLDED_FEW = 128, 64  # numbers at most of which a score is the product; with fewer products, or few codes
FEW = 2048  # codes, of few dimensions, that have a slot each
CHUNK = 64  # dimensions at a time where a tile of vectors does not fit the registers


class Tiles(NamedTuple):
    block_n: int
    block_k: int
    chunk: int
    """Dimensions at a time."""
    warps: int
    stages: int
    each: bool = False
    """Each column of the tiles is a slot: more registers, and no second kernel."""


def width_of(k: int, d: int, halves: int) -> int:
    """Of how many numbers a score is the one product (`Fold`); 0 where that would take longer than products apart."""
    width = max(16, power_of_2(halves * d + 3))
    most = FOLDED if halves == 3 and k > FEW else FOLDED_FEW
    return width if d <= 32 and width <= most else 0


def tile_sizes(k: int, d: int, precision: str, width: int = 0) -> Tiles:
    """For a class of shapes, the fastest of those tried on one H200; `width` is that of `width_of`."""
    padded = max(16, power_of_2(d))
    if padded <= 64 and k <= FEW:
        return Tiles(64, 64, padded, 4, 3 if width else 2, each=True)
    if width:
        return Tiles(64 if width <= 32 else 128, 128, padded, 4, 2 if width == FOLDED else 3)
    if padded <= 64:
        return Tiles(128, 128, padded, 4, 2 if padded == 64 and precision == "exact" else 3)
    if padded == 128:
        return Tiles(128, 128, padded, 8, 2) if precision == "exact" else Tiles(128, 64, padded, 8, 3)
    if padded == 256:
        return Tiles(128, 64, padded, 8, 1) if precision == "exact" else Tiles(128, 128, padded, 8, 2)
    return Tiles(128, 128, CHUNK, 8, 3) if precision == "exact" else Tiles(64, 128, CHUNK, 4, 3)


def proves(n: int, k: int, padded: int) -> bool:
    """Whether one product and a proof are cheaper than three products, where a few percent of the vectors have none."""
    return n * k * padded >= LARGE and padded >= PROVEN_DIMENSIONS and k >= PROVEN_CODES[padded > PROVEN_DIMENSIONS]


def shares_of(n: int, k: int, tiles: Tiles) -> int:
    """Among how many programs the codes are shared, so that few vectors keep a whole device busy."""
    return max(1, min(BUSY // max(1, cdiv(n, tiles.block_n)), cdiv(k, tiles.block_k) // LEAST_TILES))


class Pass(NamedTuple):
    """A search through all codes, in shares of a number of tiles."""

    tiles: Tiles
    shares: int
    share: int

    @staticmethod
    def of(tiles: Tiles, k: int, shares: int) -> Pass:
        share = cdiv(cdiv(k, tiles.block_k), shares)
        return Pass(tiles, cdiv(cdiv(k, tiles.block_k), share), share)

    @property
    def rows(self) -> int:
        return self.shares * self.share * self.tiles.block_k
