"""The map that codes live on: a lattice of places in D dimensions, K of which hold a code.

Legend: K codes, D axes; `index` is the flat place (row-major), `coords` its D lattice coordinates,
`positions` the point in space whose Euclidean distances the neighborhoods use.
Code k lies at place k. All places hold one, but for the last of a 2-D map whose number of codes has no balanced shape:
the end of its last row is empty. An empty place gives nothing to its neighbors, takes nothing, and is no code's place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from topovq.panel import panel

TOPOLOGIES = ("rectangular", "hexagonal")
ROW_HEIGHT = math.sqrt(3) / 2  # of a hexagonal lattice whose neighbors are one unit apart
LARGEST_ASPECT = 4  # a balanced grid is never longer than this many times its shortest side
MOST_DRAWN, MOST_NUMBERED = 1024, 256  # places in a notebook's picture of a grid
NEAR_SQUARE = 1.25  # ... and one whose last row is partly empty this many times: its shape is free


class Grid:
    """A lattice of places.

    shape     an int (a line), or one size per axis: `Grid((16, 32))`; `Grid.balanced(512)` chooses one for you
    topology  "rectangular", or "hexagonal" (2-D: odd rows are half a cell to the right, rows are sqrt(3)/2 apart)
    wrap      open borders (False), a torus (True), or one bool per axis
    size      number of codes, where the last row of a 2-D shape is partly empty: `Grid((3, 4), size=11)`
    """

    _size: int | None = None  # where not every place holds a code

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        topology: str = "rectangular",
        wrap: bool | Sequence[bool] = False,
        size: int | None = None,
    ) -> None:
        self.shape = _checked_shape(shape)
        if size is not None and size != self.places:
            self._size = _checked_size(size, self.shape)
        self.topology = topology
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology={topology!r} is unknown; choose one of {', '.join(map(repr, TOPOLOGIES))}")
        if isinstance(wrap, bool):
            self.wrap: tuple[bool, ...] = (wrap,) * self.ndim
        elif isinstance(wrap, Iterable) and all(isinstance(w, bool) for w in wrap):
            self.wrap = tuple(wrap)
        else:
            raise TypeError(f"wrap={wrap!r} is not a bool or one bool per axis, such as (True, False)")
        if len(self.wrap) != self.ndim:
            raise ValueError(f"wrap={wrap!r} has {len(self.wrap)} entries, but shape {self.shape} has {self.ndim} axes")
        if topology == "hexagonal" and self.ndim != 2:
            raise ValueError(f"a hexagonal grid has 2 axes, but shape {self.shape} has {self.ndim}")
        if topology == "hexagonal" and self.wrap[0] and self.shape[0] % 2:
            raise ValueError(
                f"a hexagonal grid that wraps over its rows needs an even number of them, but shape {self.shape} "
                f"has {self.shape[0]}; use {self.shape[0] + 1} rows or wrap=(False, {self.wrap[1]})"
            )

    @classmethod
    def balanced(
        cls, size: int, ndim: int = 2, *, topology: str = "rectangular", wrap: bool | Sequence[bool] = False
    ) -> Grid:
        """The grid of `size` codes whose `ndim` sides are as equal as they can be: 512 gives (16, 32).

        A size that factors badly (a prime, say) gets in 2-D the nearly square shape with the fewest empty places, at
        the end of its last row: 509 gives (21, 25). With other `ndim` it is refused with the nearest sizes that work.
        """
        _check_count("size", size)
        _check_count("ndim", ndim)
        shape = balanced_shape(size, ndim)
        if shape is None and ndim == 2:
            shape = _ragged_shape(size)
        if shape is None:
            near = _nearby_sizes(size, ndim)
            raise ValueError(
                f"{size} codes make no balanced {ndim}-D grid; nearby sizes that do: {', '.join(map(str, near))} "
                f"(or give the shape yourself, such as grid={size} for a line)"
            )
        return cls(shape, topology=topology, wrap=wrap, size=size)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of codes, K."""
        return self.places if self._size is None else self._size

    @property
    def places(self) -> int:
        """The number of places, at least K: those from K on are empty."""
        return math.prod(self.shape)

    @property
    def full(self) -> Grid:
        """This grid with a code at every place."""
        return self if self._size is None else Grid(self.shape, topology=self.topology, wrap=self.wrap)

    def coords(self, indices: Tensor | Sequence[int] | int | None = None) -> Tensor:
        """Lattice coordinates int64 [..., D] of flat indices [...] (default: of all K codes, in order)."""
        indices = torch.arange(self.size) if indices is None else _integers("indices", indices)
        check_range("place", indices, self.size)
        return torch.stack(self.unflatten(indices), -1)

    def index(self, coords: Tensor | Sequence[int]) -> Tensor:
        """Flat indices int64 [...] of lattice coordinates [..., D]; those off the grid or of no code are refused."""
        coords = _integers("coords", coords)
        if coords.shape[-1:] != (self.ndim,):
            raise ValueError(f"coords of shape {tuple(coords.shape)} must end in {self.ndim}, the grid's axes")
        off = (coords < 0) | (coords >= torch.tensor(self.shape, device=coords.device))
        if off.any():
            bad = coords[off.any(-1)].reshape(-1, self.ndim)[0].tolist()
            raise ValueError(f"coords {bad} lie off the grid of shape {self.shape}")
        index = self.flatten(coords.unbind(-1))
        if self._size is not None and (index >= self._size).any():
            bad = coords[index >= self._size].reshape(-1, self.ndim)[0].tolist()
            last = self.coords(self._size - 1).tolist()
            raise ValueError(f"the place at coords {bad} holds no code: the last one is at {last}")
        return index

    def positions(self, indices: Tensor | Sequence[int] | int | None = None) -> Tensor:
        """Points float64 [..., D] in the space in which `distance` is Euclidean."""
        coords = self.coords(indices).double()
        if self.topology == "rectangular":
            return coords
        row, column = coords.unbind(-1)
        return torch.stack([row * ROW_HEIGHT, column + 0.5 * (row % 2)], -1)

    def at(self, points: Tensor) -> Tensor:
        """Flat indices int64 [...] of the places nearest to points [..., D] of `positions`; -1 where there is no code.

        Axes that wrap go round; beyond an open border there is nothing.
        """
        along = list(points.double().unbind(-1))
        if self.topology == "hexagonal":
            row = (along[0] / ROW_HEIGHT + 0.5).floor()
            along = [row, along[1] - 0.5 * (row % 2)]
        places = [(a + 0.5).floor().long() for a in along]
        places = [p % n if wraps else p for p, n, wraps in zip(places, self.shape, self.wrap)]
        on = torch.stack([(p >= 0) & (p < n) for p, n in zip(places, self.shape)]).all(0)
        index = self.flatten(places)
        return torch.where(on & (index < self.size), index, -1)

    @property
    def periods(self) -> tuple[float, ...]:
        """The length of each axis in the units of `positions`, where it wraps; infinity where it is open."""
        pitch = (ROW_HEIGHT, 1.0) if self.topology == "hexagonal" else (1.0,) * self.ndim
        return tuple(n * p if wraps else math.inf for n, p, wraps in zip(self.shape, pitch, self.wrap))

    def distance(self, i: Tensor | Sequence[int] | int, j: Tensor | Sequence[int] | int) -> Tensor:
        """Euclidean distance float64 on the map between flat indices i and j (broadcast together)."""
        delta = self.positions(i) - self.positions(j)
        return self.length(delta)

    def length(self, delta: Tensor) -> Tensor:
        """Length of differences of positions [..., D], the short way round on axes that wrap."""
        for axis, period in enumerate(self.periods):
            if math.isfinite(period):
                span = delta[..., axis].abs() % period
                delta = torch.cat(
                    [delta[..., :axis], torch.minimum(span, period - span)[..., None], delta[..., axis + 1 :]], -1
                )
        length: Tensor = torch.linalg.vector_norm(delta, dim=-1)
        return length

    def distance_matrix(self, device: torch.device | str | None = None) -> Tensor:
        """All K x K distances, float64: for tests and small K."""
        every = torch.arange(self.size, device=device)
        return self.distance(every[:, None], every[None, :])

    def shift(
        self, indices: Tensor | Sequence[int] | int, offset: int | Sequence[int], *, wrap: bool | None = None
    ) -> Tensor:
        """Move flat indices by `offset` lattice steps (one int for every axis, or one per axis).

        Axes that wrap go round, open ones stop at the border; `wrap=True` or `wrap=False` decides for all axes.
        What would come to an empty place stops at the last code of its column, or of the last row where it was there
        before. Negative indices (masked tokens) stay as they are.
        """
        steps = tuple(offset) if isinstance(offset, Iterable) else (offset,) * self.ndim
        if len(steps) != self.ndim or not all(isinstance(s, int) for s in steps):
            raise ValueError(f"offset={offset!r} must be an int or {self.ndim} ints, one per axis of {self.shape}")
        indices = _integers("indices", indices)
        places = indices.clamp(min=0)
        check_range("place", places, self.size)
        moved = []
        for n, goes_round, along, step in zip(self.shape, self.wrap, self.unflatten(places), steps):
            goes_round = goes_round if wrap is None else wrap
            moved.append((along + step) % n if goes_round else (along + step).clamp(0, n - 1))
        there = self.flatten(moved)
        if self._size is not None:
            rows, columns = self.shape
            border = torch.where(places // columns == rows - 1, self._size - 1, there - columns)
            there = torch.where(there < self._size, there, border)
        return torch.where(indices < 0, indices, there)

    def unflatten(self, indices: Tensor) -> list[Tensor]:
        """Lattice coordinates [...] of flat indices [...], one tensor an axis; nothing is checked."""
        axes = []
        for n in reversed(self.shape):
            axes.append(indices % n)
            indices = indices // n
        return axes[::-1]

    def flatten(self, axes: Sequence[Tensor]) -> Tensor:
        """Flat indices [...] of lattice coordinates, one tensor an axis; nothing is checked."""
        index = axes[0]
        for n, along in zip(self.shape[1:], axes[1:]):
            index = index * n + along
        return index

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description: `Grid.from_dict(grid.to_dict()) == grid`."""
        size = {} if self._size is None else {"size": self._size}
        return {"shape": list(self.shape), **size, "topology": self.topology, "wrap": list(self.wrap)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Grid:
        return cls(tuple(data["shape"]), topology=data["topology"], wrap=tuple(data["wrap"]), size=data.get("size"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.shape, self.size, self.topology, self.wrap))

    def _repr_html_(self) -> str:
        """What a notebook shows: the sides and borders, and where they can be seen the places, numbered where few."""
        empty = "" if self._size is None else f" at {self.places:,} places: the last row is not full"
        names = ("rows", "columns") if self.ndim == 2 else [f"axis {axis}" for axis in range(self.ndim)]
        sides = {
            name: f"{n:,}, {'goes round' if wraps else 'open'}" for name, n, wraps in zip(names, self.shape, self.wrap)
        }
        picture = [[self._svg()]] if self.ndim <= 2 and self.places <= MOST_DRAWN else []
        return panel("Grid", {"codes": f"{self.size:,}{empty}", "topology": self.topology, **sides}, picture)

    def _svg(self) -> str:
        """The places as outlines, with their indices where there is room."""
        positions = self.positions()
        x_K, y_K = positions.flip(-1).T.tolist() if self.ndim == 2 else (positions[:, 0].tolist(), [0.0] * self.size)
        hexagonal = self.topology == "hexagonal"
        outline = "m0-.55l.47.28v.54l-.47.28l-.47-.28v-.54z" if hexagonal else "m-.46-.46h.92v.92h-.92z"
        cells = "".join(f"M{x:.4g} {y:.4g}{outline}" for x, y in zip(x_K, y_K))
        wide, high = max(x_K) + 1.4, max(y_K) + 1.4
        numbered = enumerate(zip(x_K, y_K)) if self.size <= MOST_NUMBERED else ()
        numbers = "".join(f'<text x="{x:.4g}" y="{y + 0.1:.4g}">{k}</text>' for k, (x, y) in numbered)
        return (
            f'<svg viewBox="-.7 -.7 {wide:.4g} {high:.4g}" style="width: {min(28 * wide, 480):.0f}px; max-width: 100%" '
            f'role="img" aria-label="the places of the map"><path d="{cells}" fill="currentColor" fill-opacity=".08" '
            'stroke="currentColor" stroke-width=".03"/><g fill="currentColor" font-size=".3" text-anchor="middle">'
            f"{numbers}</g></svg>"
        )

    def __repr__(self) -> str:
        size = "" if self._size is None else f"size={self._size}, "
        return f"Grid({self.shape}, {size}topology={self.topology!r}, wrap={self.wrap})"


def balanced_shape(size: int, ndim: int) -> tuple[int, ...] | None:
    """The factorization of `size` into `ndim` sides with the smallest longest-to-shortest ratio, ascending, or None.

    No side is 1 (but for a single code), and no side is over LARGEST_ASPECT times another.
    """
    if size == 1 or ndim == 1:
        return (1,) * (ndim - 1) + (size,)
    best = min(_factorizations(size, ndim, 2), key=lambda sides: sides[-1] / sides[0], default=None)
    return best if best is not None and best[-1] <= LARGEST_ASPECT * best[0] else None


def _ragged_shape(size: int) -> tuple[int, int]:
    """Of all (rows, columns) that are nearly square and whose last row holds a code, that with the fewest places.

    Nearly square are columns of at most NEAR_SQUARE times the rows, or one more than them.
    """
    shapes = []
    for rows in range(1, math.isqrt(size) + 2):
        columns = max(rows, -(-size // rows))
        if columns <= max(NEAR_SQUARE * rows, rows + 1) and (rows - 1) * columns < size:
            shapes.append((rows, columns))
    return min(shapes, key=lambda shape: (shape[0] * shape[1], shape[1] - shape[0]))


def _factorizations(size: int, ndim: int, least: int) -> Iterable[tuple[int, ...]]:
    if ndim == 1:
        if size >= least:
            yield (size,)
        return
    side = least
    while side**ndim <= size:
        if size % side == 0:
            for rest in _factorizations(size // side, ndim - 1, side):
                yield (side, *rest)
        side += 1


def _nearby_sizes(size: int, ndim: int) -> list[int]:
    """The nearest sizes below and above that have a balanced shape."""
    below = next((k for k in range(size - 1, 0, -1) if balanced_shape(k, ndim)), None)
    above = next(k for k in range(size + 1, 2 * size + 2**ndim + 1) if balanced_shape(k, ndim))
    return [k for k in (below, above) if k is not None]


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be an int of at least 1")


def _checked_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    sides = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, (tuple, list, torch.Size)) else ()
    if not sides or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in sides):
        raise ValueError(f"grid shape {shape!r} must be an int or a tuple of ints, each at least 1, such as (16, 32)")
    return sides


def _checked_size(size: object, shape: tuple[int, ...]) -> int:
    _check_count("size", size)
    assert isinstance(size, int)
    if len(shape) != 2 or shape[0] == 1:
        raise ValueError(
            f"size={size} does not fit the shape {shape}, which has {math.prod(shape)} places: only the last of "
            "several rows of a 2-D map may be partly empty"
        )
    rows, columns = shape
    if not (rows - 1) * columns < size <= rows * columns:
        other = balanced_shape(size, 2) or _ragged_shape(size)
        raise ValueError(
            f"size={size} does not fit the shape {shape}, whose last row holds from 1 to {columns} codes: give "
            f"{(rows - 1) * columns + 1} to {rows * columns}, or other sides, such as {other}"
        )
    return size


def check_range(what: str, indices: Tensor, size: int, *, masked: bool = False) -> None:
    """Refuse indices that are not 0 to size - 1 (or -1, where `masked` ones may be).

    Only where looking costs nothing: asking a GPU would make the host wait.
    """
    if torch.compiler.is_compiling() or indices.device.type != "cpu" or not indices.numel():
        return
    low, high, least = int(indices.min()), int(indices.max()), -1 if masked else 0
    if low < least or high >= size:
        bad = low if low < least else high
        also = ", or -1 for masked" if masked else ""
        raise ValueError(f"{what} {bad} is out of range: expected 0 to {size - 1}{also}")


def _integers(name: str, value: Tensor | Sequence[int] | int) -> Tensor:
    value = torch.as_tensor(value)
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {value.dtype}")
    return value.long()
