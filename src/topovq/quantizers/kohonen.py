"""KohonenVQ: the vector quantizer whose codes live on a map. EMA-VQ is KohonenVQ(neighborhood="none")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from topovq.codebook import Codebook, Turn
from topovq.grid import TOPOLOGIES, Grid
from topovq.neighborhood import NEIGHBORHOODS, Neighborhood, Schedule, narrowing, recommended_decay
from topovq.ops.bound import counted
from topovq.ops.quantize import Choice
from topovq.ops.search import check_metric, check_precision
from topovq.pretrained import HubModule
from topovq.quantizers.arguments import ADVICE, refuse_arguments
from topovq.quantizers.codebook_loss import codebook_loss
from topovq.quantizers.extras import Extras
from topovq.quantizers.layer import Layer
from topovq.quantizers.neural_gas import GAS, KERNEL, GasCodebook
from topovq.quantizers.parameters import PenalizedCodebook, RevivingCodebook
from topovq.quantizers.results import Ask, Part

GridLike = Grid | int | Sequence[int] | dict[str, Any] | None


class KohonenVQ(Layer, HubModule):
    """`quantized, indices, loss = KohonenVQ(dim, codebook_size)(x)`.

    The map
        grid            shape of the map (tuple, list or int) or a Grid; default: a balanced 2-D one for codebook_size,
                        whose last row is partly empty where that factors badly (grid.py)
        topology, wrap  "rectangular" or "hexagonal"; open borders (False), a torus (True), or one bool per axis
        neighborhood    "ride", if nothing is named: a code keeps the mean of the vectors that choose it and rides along
                        with its neighbors, the same from the first update to the last (codebook.py), after a start from
                        the first batch. By name, with the paper's settings: "hard", "gaussian", "exponential", or
                        "none" (EMA-VQ). "narrowing", what was recommended until version 0.2: a Gaussian whose width
                        falls over the training (neighborhood.py). "gas", neural gas: codes learn by their rank among
                        all codes instead of their distance on the map, whose places then mean nothing (neural_gas.py)
        steps           number of training updates to come, if known: a lower decay if they are few, and the schedule of
                        "narrowing"
        tau, radius     the paper's schedule 1/(1 + t*tau), tau = 0.1, and the neighborhood's first width
                        (neighborhood.py)
        schedule        instead of tau and radius, the width over a known number of steps: Schedule.linear(start, end,
                        steps) or Schedule.exponential(start, end, steps)
    The learning rule (codebook.py)
        decay           0.99 if not given; less where `steps` is below 6,000 (neighborhood.py: recommended_decay);
                        1 keeps the codes where they start
        update_empty    whether the statistics of codes that receive nothing decay, and counts are smoothed by eps
                        ("ride" never smooths them). If not given: True, as in the paper; False with "narrowing", since
                        smoothing pulls codes that receive little to the origin
        eps, count_init, count_smoothing
        kmeans_init, kmeans_iters   start from the first batch: k-means, or with 0 iterations vectors drawn from it
        threshold_ema_dead_code     revive codes that lately received less than this at vectors of the batch: below 1 a
                                    share of the mean count, from 1 on a count of vectors per batch (0: never; "ride"
                                    then revives codes beside busy neighbors)
        ema_update, freeze_codebook False / True: codes do not move (but ema_update=False may start from the data)
        learnable_codebook          codes are parameters, moved by the codebook loss (needs ema_update=False) without
                                    neighbors (GradientVQ has a loss with them)
                                    None, for both and for rotation_trick: vector-quantize-pytorch's default
        sync_codebook               None: statistics are summed over all ranks wherever a process group exists
    The layer
        codebook_dim, heads, separate_codebook_per_head, metric or use_cosine_sim, rotation_trick,
        commitment_weight (0.25 in the paper), channel_last, accept_image_fmap, accept_3d_fmap
        options         orthogonal_reg_*, stochastic_sample_codes, directional_reparam and others of extras.py
        precision       "exact", or "fast" for half the search time on CUDA and, rarely, the second-closest code
    """

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        codebook_dim: int | None = None,
        heads: int = 1,
        separate_codebook_per_head: bool = False,
        decay: float | None = None,
        eps: float = 1e-5,
        freeze_codebook: bool = False,
        kmeans_init: bool = False,
        kmeans_iters: int = 10,
        use_cosine_sim: bool = False,
        threshold_ema_dead_code: float = 0.0,
        channel_last: bool = True,
        accept_image_fmap: bool = False,
        accept_3d_fmap: bool = False,
        commitment_weight: float = 1.0,
        rotation_trick: bool | None = False,
        sync_codebook: bool | None = None,
        ema_update: bool | None = None,
        learnable_codebook: bool | None = None,
        *,
        grid: GridLike = None,
        topology: str = "rectangular",
        wrap: bool | Sequence[bool] = False,
        steps: int | None = None,
        neighborhood: str | None = None,
        tau: float | None = None,
        radius: float | None = None,
        schedule: Schedule | dict[str, Any] | None = None,
        count_init: float = 1.0,
        update_empty: bool | None = None,
        count_smoothing: str = "carried",
        metric: str = "euclidean",
        precision: str = "exact",
        **options: Any,
    ) -> None:
        extras = Extras.taken_from(options)
        refuse_arguments(type(self).__name__, options, ADVICE, type(self), KohonenVQ, Extras)
        for name, value in (("dim", dim), ("codebook_size", codebook_size), ("heads", heads)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be an int of at least 1")
        codebook_dim = dim if codebook_dim is None else codebook_dim
        if not isinstance(codebook_dim, int) or codebook_dim < 1:
            raise ValueError(f"codebook_dim={codebook_dim!r} must be an int of at least 1, or None for dim")
        # None is vector-quantize-pytorch's default, and means what it means there.
        directional = extras.directional_reparam
        ema_update = not directional if ema_update is None else ema_update
        learnable_codebook = directional if learnable_codebook is None else learnable_codebook
        rotation_trick = dim > 1 and not directional if rotation_trick is None else rotation_trick
        if directional and (rotation_trick or not learnable_codebook):
            raise ValueError(
                "directional_reparam=True is a gradient of its own, for codes that are parameters: leave out "
                f"rotation_trick={rotation_trick!r} and learnable_codebook={learnable_codebook!r}"
            )
        if learnable_codebook and ema_update:
            raise ValueError(
                "learnable_codebook=True needs ema_update=False: codes follow either the gradient or the running means"
            )
        if learnable_codebook and not self.pulls_neighbors:
            neighborhood = without_neighborhood(steps, neighborhood, tau, radius, schedule)
        neighborhood = neighborhood_name(neighborhood, tau, radius, schedule)
        if learnable_codebook and neighborhood in (*RECOMMENDED, GAS):
            raise ValueError(
                f"neighborhood={neighborhood!r} moves running means, which codes that follow the gradient do not have: "
                f"choose one of {', '.join(map(repr, NEIGHBORHOODS))}"
            )
        if use_cosine_sim and metric not in ("euclidean", "cosine"):
            raise ValueError(f"use_cosine_sim=True and metric={metric!r} exclude each other: give one")
        metric = "cosine" if use_cosine_sim else metric
        check_metric(metric)
        check_precision(precision)
        usual_decay = recommended_decay(steps)
        lattice = make_grid(codebook_size, grid, topology, wrap)
        around = make_neighborhood(lattice, steps, neighborhood, tau, radius, schedule)
        kind = codebook_kind(learnable_codebook, directional and threshold_ema_dead_code > 0, extras)
        if neighborhood == GAS:
            if kind is not Codebook:
                raise ValueError("neighborhood='gas' and orthogonal_reg_weight exclude each other: leave one out")
            kind = GasCodebook
        books = [
            kind(
                codebook_dim,
                around,
                ride=neighborhood == "ride",
                metric=metric,
                precision=precision,
                decay=usual_decay if decay is None else decay,
                eps=eps,
                count_init=count_init,
                update_empty=neighborhood != "narrowing" if update_empty is None else update_empty,
                count_smoothing=count_smoothing,
                dead_threshold=threshold_ema_dead_code,
                kmeans_init=kmeans_init,
                kmeans_iters=kmeans_iters,
                learnable=learnable_codebook,
                ema_update=ema_update,
                sync=sync_codebook is not False,
            )
            for _ in range(heads if separate_codebook_per_head else 1)
        ]
        super().__init__(
            dim,
            books,
            codebook_dim=codebook_dim,
            heads=heads,
            channel_last=channel_last,
            accept_image_fmap=accept_image_fmap,
            accept_3d_fmap=accept_3d_fmap,
            commitment_weight=0.0 if directional else commitment_weight,
            rotation_trick=rotation_trick,
            freeze_codebook=freeze_codebook,
            extras=extras,
        )
        named = spelled_radius({"neighborhood": neighborhood, "radius": radius, "schedule": schedule}, lattice.ndim)
        told = {name: named[name] for name in ("neighborhood", "radius") if named[name] is not None}
        (getattr(self, "_hub_mixin_config", None) or {}).update(told)

    codebook_weight = 1.0
    pulls_neighbors = False  # whether the loss that moves codes which are parameters has a term for the neighborhood

    @classmethod
    def _from_pretrained(cls, **arguments: Any) -> Self:
        arguments = radius_before(arguments)
        return super()._from_pretrained(**(arguments if cls.pulls_neighbors else as_saved(arguments)))

    def _quantize(self, book: Codebook, x_ND: Tensor, keep_N: Tensor | None, ask: Ask) -> Part:
        if ask.chosen is not None and isinstance(book, GasCodebook):
            raise TypeError("neighborhood='gas': codes learn by rank, so codes that were chosen elsewhere mean nothing")
        return super()._quantize(book, x_ND, keep_N, ask)

    def _codebook_loss(
        self, book: Codebook, turn: Turn, x_ND: Tensor, choice: Choice, keep_N: Tensor | None
    ) -> Tensor | None:
        """Where codes are parameters, codebook_weight * mean |w_k* - sg(x)|^2 per element over the valid vectors."""
        if not book.learnable or self.output_moves_codes:
            return None
        loss = choice.error.detach()
        if turn.learns:
            loss = codebook_loss(book.free_codes(), choice.sums_KD, choice.counts_K, loss)
        return self.codebook_weight * loss

    @property
    def output_moves_codes(self) -> bool:
        """Whether codes that are parameters follow the gradient of the output, and not a loss of their own."""
        return self.extras.directional_reparam or not self.extras.route_gradients_to_input

    @property
    def neighborhood(self) -> Neighborhood:
        return self.codebook_of(0).neighborhood


def codebook_kind(learnable: bool, revived: bool, extras: Extras) -> type[Codebook]:
    if learnable:
        return RevivingCodebook if revived else Codebook
    return PenalizedCodebook if extras.orthogonal_reg_weight else Codebook


RECOMMENDED = ("ride", "narrowing")  # neighborhoods that need no other argument: now, and until version 0.2
REACH = ("steps", "neighborhood", "tau", "radius", "schedule")  # the arguments that make a neighborhood


def without_neighborhood(*reach: Any) -> str:
    """The name of no neighborhood, for codes that the codebook loss moves; values of REACH that ask for one are
    refused."""
    given = [f"{name}={value!r}" for name, value in zip(REACH, reach) if value is not None and value != "none"]
    if given:
        raise ValueError(
            f"learnable_codebook=True and {', '.join(given)} exclude each other: the codebook loss moves the chosen "
            "codes alone; GradientVQ(..., neighborhood='hard') has a loss that moves their neighbors, too"
        )
    return "none"


def follows_gradient(arguments: dict[str, Any]) -> bool:
    """Whether the codes of a KohonenVQ or a ResidualVQ with these arguments are parameters."""
    return any(arguments.get(name) for name in ("learnable_codebook", "directional_reparam", "diveq"))


def as_saved(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a layer that was saved some time ago, as they were meant then.

    What is saved now names its neighborhood. Once, learnable codes could be given one that nothing used, and one that
    was left open was "narrowing".
    """
    if follows_gradient(arguments):
        return {name: value for name, value in arguments.items() if name not in REACH}
    return {**arguments, "neighborhood": arguments.get("neighborhood") or "narrowing"}


def spelled_radius(arguments: dict[str, Any], ndim: int, reach: float = math.sqrt(2)) -> dict[str, Any]:
    """The arguments with the reach of "hard" on a map of more than two dimensions named, where they leave it open."""
    left_open = arguments.get("radius") is None and arguments.get("schedule") is None
    named = {"radius": reach} if left_open and ndim > 2 and arguments.get("neighborhood") == "hard" else {}
    return {**arguments, **named}


def radius_before(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a layer that was saved some time ago: "hard" reached sqrt(D) in D dimensions, unnamed."""
    grid = arguments.get("grid")
    shape = grid.get("shape") if isinstance(grid, dict) else grid
    ndim = len(shape) if isinstance(shape, (list, tuple)) else 1
    return spelled_radius(arguments, ndim, math.sqrt(ndim))


def valid_index(x_ND: Tensor, codes_KD: Tensor, index_N: Tensor, keep_N: Tensor | None) -> Tensor:
    """The codes chosen in training, -1 where a vector is masked or does not count (ops/bound.py)."""
    valid_N = counted(x_ND, codes_KD, learns=True)
    return torch.where(valid_N if keep_N is None else valid_N & keep_N, index_N, -1)


def make_grid(codebook_size: int, grid: GridLike, topology: str, wrap: bool | Sequence[bool]) -> Grid:
    """The map of codebook_size codes."""
    if isinstance(grid, dict):  # as config.json holds it
        grid = Grid.from_dict(grid)
    if isinstance(grid, Grid):
        if topology != TOPOLOGIES[0] or wrap is not False:
            raise ValueError(f"topology={topology!r} and wrap={wrap!r} belong to the Grid when grid is one: {grid}")
        made = grid
    elif grid is None:
        made = Grid.balanced(codebook_size, topology=topology, wrap=wrap)
    else:
        made = Grid(grid, topology=topology, wrap=wrap)
    if made.size != codebook_size:
        raise ValueError(
            f"a grid of shape {made.shape} holds {made.size} codes, but codebook_size={codebook_size}; "
            f"give a shape whose sides multiply to {codebook_size}, leave grid out, or give a Grid with "
            f"size={codebook_size}, the end of whose last row is empty"
        )
    return made


def neighborhood_name(
    given: str | None, tau: float | None, radius: float | None, schedule: Schedule | dict[str, Any] | None
) -> str:
    """The neighborhood that is meant: the recommended one, or that which the other arguments are parts of."""
    if given is not None:
        return given
    return "ride" if tau is None and radius is None and schedule is None else "narrowing"


def make_neighborhood(
    grid: Grid,
    steps: int | None,
    kind: str,
    tau: float | None,
    radius: float | None,
    schedule: Schedule | dict[str, Any] | None,
) -> Neighborhood:
    """The neighborhood that KohonenVQ's arguments name; what they leave open of one in RECOMMENDED is as it says."""
    named = {"neighborhood": None if kind in RECOMMENDED else kind, "tau": tau, "radius": radius, "schedule": schedule}
    given = [f"{name}={value!r}" for name, value in named.items() if value is not None]
    if steps is not None and given:
        raise ValueError(
            f"steps={steps!r} is for a recommended neighborhood and {', '.join(given)} names another one: leave one out"
        )
    if kind == "ride":
        if given:
            raise ValueError(f"neighborhood='ride' has a reach of its own: leave out {', '.join(given)}")
        return Neighborhood("none", grid)  # its means are EMA-VQ's; ops/ride.py moves neighbors along
    if schedule is not None and tau is not None:
        raise ValueError(f"tau={tau!r} and schedule={schedule} exclude each other: give one")
    if isinstance(schedule, dict):  # as config.json holds it
        schedule = Schedule.from_dict(schedule)
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"schedule={schedule!r} is no Schedule: make one with Schedule.linear(start, end, steps)")
    if kind == "narrowing":
        kind, usual, first = narrowing(grid, steps)
        radius = first if radius is None and (schedule is None or schedule.kind == "harmonic") else radius
        schedule = usual if schedule is None and tau is None else schedule
    if schedule is None:
        schedule = Schedule.harmonic(0.1 if tau is None else tau)
    if kind == GAS:
        kind = KERNEL
        radius = grid.size / 2 if radius is None and schedule.kind == "harmonic" else radius
    if kind not in NEIGHBORHOODS:
        choices = ", ".join(map(repr, (*RECOMMENDED, *NEIGHBORHOODS, GAS)))
        raise ValueError(f"neighborhood={kind!r} is unknown; choose one of {choices}")
    return Neighborhood(kind, grid, schedule=schedule, radius=radius)
