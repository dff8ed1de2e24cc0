"""How far a winner's update reaches on the map, and how that shrinks over training.

A(t) is the K x K neighborhood matrix: A_jk = strength(t) * f(dist(j, k) / width(t)) off the diagonal, 1 on it.
    none         A = I (K-means, EMA-VQ)
    hard         f(r) = 1 for r <= 1, else 0
    gaussian     f(r) = exp(-r^2)
    exponential  f(r) = exp(-r)
The width is in cells of the map, here and everywhere in this package. A Gaussian's standard deviation, which the
estimators of topovq.som call radius, is width / sqrt(2).

With the paper's harmonic schedule s(t) = 1/(1 + t*tau) and `radius` R:
    hard         width = R (1 on a line and between hexagons, else sqrt(2)), strength = s(t)
    gaussian     width^2 = R^2 s(t), R = 1                                       (the paper's formula)
    exponential  width = R s(t), R = 10                                          (the authors' code)
With a schedule over a known number of steps the width itself is what falls, from `start` to `end`, and strength is 1.

This is a description in plain numbers; ops/smooth.py applies A^T to statistics without the matrix.
Everything that depends on t is computed on the device from the step tensor: nothing waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from topovq.grid import Grid

NEIGHBORHOODS = ("none", "hard", "gaussian", "exponential")
SCHEDULES = ("harmonic", "linear", "exponential")
CUTOFF = 1e-10  # a weight below this share of the whole is no weight
NARROWEST = 1e-6  # a neighborhood of width 0 is the identity: no division by it

# The recommended setting, "ride" (codebook.py has the rule, docs/explanation/default.md what it rests on).
RIDE_SPACING = 4.0  # cells between the points through which neighbors share how far their vectors moved
GAIN = 0.3  # share of what its neighborhood's vectors moved that a code moves along with
PULL = 0.3  # of a code to its neighbors, at first, as a share of the pull of the vectors that choose it,
PULL_SPAN = 2500  # ... falling as 1/sqrt(1 + t / PULL_SPAN)
ENOUGH = 1.0  # vectors, weighted by distance on the map: with fewer a code rides by as much less
WAIT = 50  # updates without a vector after which a code is dead,
WAIT_VECTORS = 1  # ... or the updates that bring this many vectors for each code where those are more,
LONGEST_WAIT = 5000  # ... but never more than this
NEAR = 1.2  # cells: a dead code asks a place at distance NEAR / sqrt(u), u uniform,
TRIES = 8  # ... and then another, this many in an update
MOST_SPREAD = 16.0  # vectors, of those that chose the place asked, that widen where the dead code comes to
PASSES = 16  # of the batch map that lays the codes over the first batch
MEMORY = 100  # updates that the running means go back, 1 / (1 - decay),
MEMORY_SHARE = 1 / 60  # ... or this share of the steps where that is less,
LEAST_MEMORY = 20  # ... but never below this

# What was recommended until version 0.2, "narrowing".
START_SHARE = 1 / 16  # first width, as a share of the map's side
LEAST_START = 1.0  # ... but never below this many cells
END_WIDTH = 0.3  # last width: a neighbor's weight is 1.5e-5
SPAN = 0.5  # share of the steps over which the width falls
OPEN_SHARE = 1 / 2  # first width where the number of steps is not known: wide enough to take all codes along at once,
OPEN_MOST = 16.0  # ... but never above this many cells: on larger maps it reaches the far ones in waves
OPEN_TAU = 0.01  # of 1/(1 + t*tau) there, per cell of the first width


@dataclass(frozen=True)
class Schedule:
    """A falling quantity: make one with `Schedule.harmonic`, `Schedule.linear` or `Schedule.exponential`."""

    kind: str = "harmonic"
    tau: float | None = None
    start: float | None = None
    end: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(f"schedule kind={self.kind!r} is unknown; choose one of {', '.join(map(repr, SCHEDULES))}")
        if self.kind == "harmonic":
            if not isinstance(self.tau, (int, float)) or not 0 <= self.tau < math.inf:
                raise ValueError(f"tau={self.tau!r} must be a finite number of at least 0 (0.1 in the paper)")
            return
        if self.start is None or self.end is None or self.steps is None:
            raise ValueError(f"a {self.kind} schedule needs start, end and steps, got {self}")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps={self.steps!r} must be an int of at least 1")
        least = 0 if self.kind == "linear" else 1e-12
        if not (math.isfinite(self.start) and self.start >= self.end >= least):
            raise ValueError(
                f"start={self.start!r} and end={self.end!r} must fall from start to end, with end "
                + ("at least 0" if self.kind == "linear" else "above 0")
            )

    @classmethod
    def harmonic(cls, tau: float = 0.1) -> Schedule:
        """s(t) = 1 / (1 + t * tau): the paper's, for training of unknown length."""
        return cls("harmonic", tau=tau)

    @classmethod
    def linear(cls, start: float, end: float, steps: int) -> Schedule:
        """Width start + (end - start) * t / steps, then `end`."""
        return cls("linear", start=start, end=end, steps=steps)

    @classmethod
    def exponential(cls, start: float, end: float, steps: int) -> Schedule:
        """Width start * (end / start)^(t / steps), then `end`."""
        return cls("exponential", start=start, end=end, steps=steps)

    def __call__(self, step: Tensor) -> Tensor:
        """The value at `step` (int64, 0-dim), float64 on its device."""
        t = step.double()
        if self.kind == "harmonic":
            return 1 / (1 + t * (self.tau or 0.0))
        start, end = self.start or 0.0, self.end or 0.0
        progress = (t / (self.steps or 1)).clamp(max=1)
        if self.kind == "linear":
            return start + (end - start) * progress
        return start * (end / start) ** progress

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schedule:
        return cls(**data)


class Neighborhood:
    """The neighborhood matrix A(t) of a grid: its width and strength, its weights, and the matrix itself."""

    def __init__(self, kind: str, grid: Grid, *, schedule: Schedule | None = None, radius: float | None = None) -> None:
        if kind not in NEIGHBORHOODS:
            raise ValueError(f"neighborhood={kind!r} is unknown; choose one of {', '.join(map(repr, NEIGHBORHOODS))}")
        self.kind = kind
        self.grid = grid
        self.schedule = schedule if schedule is not None else Schedule.harmonic()
        harmonic = self.schedule.kind == "harmonic"
        if radius is not None and not harmonic:
            raise ValueError(
                f"radius={radius!r} has no meaning with a {self.schedule.kind} schedule, which gives the width "
                f"itself: its start is {self.schedule.start}"
            )
        if radius is not None and not (math.isfinite(radius) and radius > 0):
            raise ValueError(f"radius={radius!r} must be a finite number above 0")
        self.radius = radius if radius is not None else default_radius(kind, grid) if harmonic else None

    @property
    def widest(self) -> float:
        """The largest width there will be: schedules only fall. The host knows it, so shapes can follow from it."""
        widest = self.radius if self.schedule.kind == "harmonic" else self.schedule.start
        assert widest is not None
        return widest

    def width(self, step: Tensor) -> Tensor:
        """How far the neighborhood reaches at `step`, in cells of the map, float64, 0-dim."""
        if self.schedule.kind != "harmonic":
            return self.schedule(step).clamp(min=NARROWEST)
        if self.kind in ("none", "hard"):
            return torch.full_like(step, self.widest, dtype=torch.float64)
        share = self.schedule(step)
        return self.widest * (share.sqrt() if self.kind == "gaussian" else share)

    def strength(self, step: Tensor) -> Tensor:
        """The factor of the weights off the diagonal at `step`, float64, 0-dim."""
        if self.kind == "hard" and self.schedule.kind == "harmonic":
            return self.schedule(step)
        return torch.ones_like(step, dtype=torch.float64)

    def weight(self, distance: Tensor, step: Tensor | int) -> Tensor:
        """A as a function of map distance: float64, the shape of `distance`, 1 at distance 0."""
        distance = distance.double()
        itself = distance == 0
        if self.kind == "none":
            return itself.double()
        step = torch.as_tensor(step)
        width = self.width(step)
        if self.kind == "hard":
            off = (distance <= width + 1e-9).double()
        elif self.kind == "gaussian":
            off = torch.exp(-((distance / width) ** 2))
        else:
            off = torch.exp(-distance / width)
        return torch.where(itself, 1.0, self.strength(step) * off)

    def reach(self, width: float) -> float:
        """The distance beyond which the weight is below CUTOFF at this width."""
        decades = -math.log(CUTOFF)
        return width * {"none": 0.0, "hard": 1.0, "gaussian": math.sqrt(decades), "exponential": decades}[self.kind]

    def matrix(self, step: Tensor | int) -> Tensor:
        """The dense K x K matrix, float64: for tests and small K."""
        return self.weight(self.grid.distance_matrix(), step)

    @property
    def numbers(self) -> tuple[list[int], list[bool], str, str, str, float, float, float, int]:
        """All of it but the number of codes, as registered operations take it."""
        grid, plan = self.grid, self.schedule
        lattice = (list(grid.shape), list(grid.wrap), grid.topology)
        return (*lattice, self.kind, plan.kind, plan.tau or 0.0, self.widest, plan.end or 0.0, plan.steps or 1)

    @classmethod
    def from_numbers(
        cls, size: int, shape: Sequence[int], wrap: Sequence[bool], topology: str,
        kind: str, schedule: str, tau: float, widest: float, end: float, steps: int,
    ) -> Neighborhood:  # fmt: skip
        """The neighborhood of `size` codes with these `numbers`."""
        grid = Grid(tuple(shape), topology=topology, wrap=tuple(wrap), size=size)
        if schedule == "harmonic":
            return cls(kind, grid, schedule=Schedule.harmonic(tau), radius=widest)
        return cls(kind, grid, schedule=Schedule(schedule, start=widest, end=end, steps=steps))

    def __repr__(self) -> str:
        return f"Neighborhood({self.kind!r}, {self.grid}, schedule={self.schedule}, radius={self.radius})"


def narrowing(grid: Grid, steps: int | None) -> tuple[str, Schedule, float | None]:
    """(kind, schedule, radius) of "narrowing"; `steps` is the number of updates to come, if known.

    A Gaussian that starts a share of the map's side wide, the side being the geometric mean of its axes. With `steps`,
    START_SHARE, falling exponentially to END_WIDTH over SPAN of them and staying there. Without, OPEN_SHARE, up to
    OPEN_MOST cells, falling as in the paper, 1/sqrt(1 + t*tau), with tau = OPEN_TAU * start: twice as wide a start
    takes twice as long to come down to one cell.
    """
    side = grid.size ** (1 / grid.ndim)
    if steps is None:
        start = max(LEAST_START, min(OPEN_MOST, OPEN_SHARE * side))
        return "gaussian", Schedule.harmonic(OPEN_TAU * start), start
    start = max(LEAST_START, START_SHARE * side)
    return "gaussian", Schedule.exponential(start, END_WIDTH, max(1, round(SPAN * steps))), None


def recommended_decay(steps: int | None) -> float:
    """0.99, or less where `steps` is known and so small that the codes would lag behind the encoder for much of it."""
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ValueError(f"steps={steps!r} must be an int of at least 1: the number of training updates to come")
    memory = MEMORY if steps is None else min(MEMORY, max(LEAST_MEMORY, MEMORY_SHARE * steps))
    return round(1 - 1 / memory, 4)


def default_radius(kind: str, grid: Grid) -> float:
    """The paper's d(G) for `hard` (the six around a hexagon), its scale for the others.

    On rectangular grids of any dimensions the authors' code takes places less than 1.5 apart.
    """
    if kind == "hard":
        return 1.0 if grid.topology == "hexagonal" else math.sqrt(min(grid.ndim, 2))
    return 10.0 if kind == "exponential" else 1.0
