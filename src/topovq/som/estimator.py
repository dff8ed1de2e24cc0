"""SelfOrganizingMap: Kohonen's map as a scikit-learn estimator."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn import get_config
from sklearn.utils import check_random_state
from torch import Tensor

from topovq import metrics
from topovq.grid import TOPOLOGIES, Grid
from topovq.neighborhood import NEIGHBORHOODS, Neighborhood, Schedule
from topovq.som import learn
from topovq.som.bar import bar
from topovq.som.batch import BatchEstimator
from topovq.som.checks import check_choice, check_number, like_input, weighted_mean
from topovq.som.passes import Passes, TablePasses, check_weight
from topovq.som.questions import Distortion, Errors, Members
from topovq.som.start import initial_codes, map_places, passes_of_start
from topovq.som.stats import Stats
from topovq.som.tables import MissingTable, Table

RULES = ("batch", "minibatch", "online")
SCHEDULES = ("exponential", "linear")


class SelfOrganizingMap(BatchEstimator):
    """Codes on a map, fitted so that neighbors on the map are alike.

    shape              one size per axis, such as (20, 30); or leave it out and give
    n_codes            the number of codes, laid out as square as can be; without either, a square of about 5 sqrt(N)
    topology           "rectangular" or "hexagonal"
    wrap               True for a torus, or one bool per axis
    rule               "batch" (all samples, then one update), "minibatch" (running averages over batches),
                       "online" (an update per sample)
    neighborhood       "gaussian" exp(-d^2 / (2 r^2)), "hard" (1 within r), "exponential" exp(-d / r), "none" (K-means)
    radius             r at the start, in cells of the map; None is half the longest side. The *width* of a
                       `topovq.Neighborhood`, as KohonenVQ has it, is sqrt(2) r for "gaussian", whose standard deviation
                       is r, and r for the others
    radius_end         r in the last pass
    schedule           "exponential" or "linear": how radius and learning rate fall, from the first pass to the last
    learning_rate, learning_rate_end    of the rules "minibatch" and "online"
    metric             "euclidean", "cosine" or "dot": for winners, distances and errors alike
    init               "pca", "sample", "random", "kmeans++", or the codes themselves [K, D]
    max_iter           passes over the data; for `partial_fit`, batches over which the schedules fall
    batch_size         samples per update of rule="minibatch"
    tol                stop once a pass lowers the quantization error by less than this share of it; None: never
    device             "auto" is CUDA where there is one; tensors stay on their own device
    n_jobs             threads; None leaves torch's setting alone
    verbose            show a progress bar
    standardize        subtract the mean of each feature and divide by its standard deviation, here and whenever rows
                       are given later; the codes are then in units of mean_ and scale_
    engine             "local", or "ray": the passes of rule="batch" and of predict are done on a Ray cluster, which is
                       the one that this process is connected to, that of RAY_ADDRESS, or one started on this machine

    Fitted: codes_ [K, D], grid_ (a `topovq.Grid`), labels_ [N] (closest code of each sample), quantization_error_,
    topographic_error_, n_iter_, n_features_in_, and for each pass quantization_errors_ (of the codes it started from)
    and radii_.
    NaN is a missing value: left out of distances and of updates.
    """

    grid_: Grid
    topographic_error_: float
    hits_: np.ndarray
    radii_: np.ndarray

    def __init__(
        self,
        shape: Any = None,
        *,
        n_codes: int | None = None,
        topology: str = "rectangular",
        wrap: Any = False,
        rule: str = "batch",
        neighborhood: str = "gaussian",
        radius: float | None = None,
        radius_end: float = 1.0,
        schedule: str = "exponential",
        learning_rate: float = 0.5,
        learning_rate_end: float = 0.1,
        metric: str = "euclidean",
        init: Any = "pca",
        max_iter: int = 10,
        batch_size: int = 1024,
        tol: float | None = None,
        device: str = "auto",
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: bool = False,
        standardize: bool = False,
        engine: str = "local",
    ) -> None:
        self.shape = shape
        self.n_codes = n_codes
        self.topology = topology
        self.wrap = wrap
        self.rule = rule
        self.neighborhood = neighborhood
        self.radius = radius
        self.radius_end = radius_end
        self.schedule = schedule
        self.learning_rate = learning_rate
        self.learning_rate_end = learning_rate_end
        self.metric = metric
        self.init = init
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.tol = tol
        self.device = device
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose
        self.standardize = standardize
        self.engine = engine

    # Fitting

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the map to X [N, D]: an array, a DataFrame, a sparse matrix or a tensor; NaN is a missing value."""
        self._check_parameters()
        if self.rule != "batch":
            return self._fit_in_order(X, sample_weight)
        passes = self._passes(X, sample_weight, reset=True)
        with self._threads(), bar(passes, self._pass_count(passes), "fitting the map", self.verbose) as say:
            self._fit(passes, say)
        return self

    def _fit_in_order(self, X: Any, sample_weight: Any) -> Self:
        """The rules that take rows in a random order."""
        table = self._table(X, reset=True)
        weight_N = self._weights(sample_weight, X, table)
        passes = TablePasses([table], [weight_N])
        with self._threads(), bar(passes, self._pass_count(passes), "fitting the map", self.verbose) as say:
            self._begin(passes)
            table = passes.tables[0]
            codes_KD, plan = self._codes(passes), self._plan()
            random = check_random_state(self.random_state)
            while self.n_iter_ < self.max_iter and not self._converged():
                distance_N = torch.empty(table.n, dtype=table.dtype, device=table.device)
                order_N = torch.from_numpy(random.permutation(table.n)).to(table.device)
                size = self.batch_size if self.rule == "minibatch" else max(self.batch_size, 1024)
                for start in range(0, table.n, size):
                    chosen = order_N[start : start + size]
                    t = self.n_iter_ + np.array([start, start + len(chosen)]) / table.n
                    codes_KD, distance = self._step(table.rows(chosen), weight_N[chosen], codes_KD, plan, *t)
                    distance_N[chosen] = distance
                    passes.advance(len(chosen))
                self._record(weighted_mean(distance_N, weight_N))
                say(f"pass {self.n_iter_}, quantization error {self.quantization_errors_[-1]:.4g}")
            self.codes_ = codes_KD.cpu().numpy()
            self._finish(passes)
        return self

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """One more update from a batch, or one from each batch of an iterable (a generator, a DataLoader).

        The schedules go on from call to call, over `max_iter` batches; the first batch gives the start. The rule is
        "minibatch" unless it is "online". The errors and labels that are kept are those of the last batch.
        """
        if self._took_batches(X, sample_weight):
            return self
        self._check_parameters()
        first = not hasattr(self, "codes_")
        if first and self.standardize:
            raise ValueError("standardize=True needs all rows first: use fit, or scale the batches yourself")
        table = self._table(X, reset=first)
        weight_N = self._weights(sample_weight, X, table)
        passes = TablePasses([table], [weight_N])
        with self._threads():
            if first:
                self._begin(passes)
            codes_KD, distance_N = self._step(
                table, weight_N, self._codes(passes), self._plan(), self.n_iter_, self.n_iter_ + 1
            )
            self.codes_ = codes_KD.cpu().numpy()
            self._record(weighted_mean(distance_N, weight_N))
            self._finish(passes)
        return self

    def _pass_count(self, passes: Passes) -> int:
        """How many passes a fit takes: the start, those of the rule, the measuring; one more to find a shape."""
        start = passes_of_start(self.init, passes.dim, self.standardize)
        return start + (self.shape is None and self.n_codes is None) + self.max_iter + 1

    def _question(self, passes: Passes) -> Members:
        return Members(self._codes(passes), self.metric)

    def _moved(self, stats: Stats, codes_KD: Tensor) -> Tensor:
        return learn.batch(stats, codes_KD, self._plan().neighborhood, self.n_iter_)

    def _step(
        self, table: Table, weight_N: Tensor, codes_KD: Tensor, plan: _Plan, t: float, t_end: float
    ) -> tuple[Tensor, Tensor]:
        """(codes, distances to the old ones) after one batch that lasts from t to t_end."""
        if self.rule == "online":
            online = learn.Online(codes_KD.cpu().numpy(), self.grid_, self.neighborhood, self.metric)
            times_N = t + (t_end - t) * np.arange(table.n) / table.n
            width_N = learn.values(plan.width, times_N).clip(1e-6)
            beta_N = learn.values(plan.rate, times_N)
            x_ND, weight = table.dense(slice(None)), weight_N.cpu().numpy()
            distance_N = torch.from_numpy(online.learn(x_ND, weight, width_N, beta_N))
            return torch.from_numpy(online.w_DK.T.copy()).to(weight_N), distance_N.to(weight_N)
        missing = isinstance(table, MissingTable)
        running = getattr(self, "_running", None)
        if running is None:
            running_KC = learn.first_average(codes_KD, float(weight_N.sum()), missing)
        else:
            running_KC = torch.from_numpy(running).double().to(weight_N.device)
        columns = codes_KD.shape[1] * 2 if missing else codes_KD.shape[1] + 1
        if running_KC.shape[1] != columns:  # a batch with missing values after ones without, or the reverse
            running_KC = _recounted(running_KC, codes_KD, missing)
        beta = float(plan.rate(torch.tensor(t)))
        codes_KD, running_KC, distance_N = learn.minibatch(
            table, weight_N, codes_KD, running_KC, plan.neighborhood, t, beta, self.metric
        )
        self._running = running_KC.cpu().numpy()
        return codes_KD, distance_N

    def _begin(self, passes: Passes) -> None:
        super()._begin(passes)
        self.radii_ = np.empty(0)

    def _first_codes(self, passes: Passes) -> Tensor:
        self.grid_ = self._grid(passes)
        return initial_codes(self.init, passes, map_places(self.grid_), check_random_state(self.random_state))

    def _record(self, error: float) -> None:
        plan = self._plan()
        self.radii_ = np.append(self.radii_, float(plan.width(torch.tensor(self.n_iter_))) / plan.width_per_radius)
        super()._record(error)

    def _finish(self, passes: Passes) -> None:
        """What is measured of the codes: one more pass."""
        labels: list[np.ndarray] | None = [] if passes.keeps_labels else None
        errors = passes.added(Errors(self._codes(passes), self.metric, self.grid_, labels))
        self.hits_ = errors["hits"].cpu().numpy()
        self.quantization_error_ = float(errors["error"] / errors["weight"])
        self.topographic_error_ = float(errors["apart"] / errors["weight"])
        if labels is not None:
            self.labels_ = np.concatenate(labels)

    # What the parameters mean

    def _check_parameters(self) -> None:
        check_choice("rule", self.rule, RULES)
        check_choice("neighborhood", self.neighborhood, NEIGHBORHOODS)
        if self.engine != "local" and self.rule != "batch":
            raise ValueError(f"engine={self.engine!r} is for rule='batch', but rule={self.rule!r}")
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("topology", self.topology, TOPOLOGIES)
        check_number("max_iter", self.max_iter, low=1, whole=True)
        check_number("batch_size", self.batch_size, low=1, whole=True)
        check_number("learning_rate", self.learning_rate, low=0, high=1)
        check_number("learning_rate_end", self.learning_rate_end, low=0, high=1)
        check_number("radius_end", self.radius_end, low=0)
        if self.radius is not None:
            check_number("radius", self.radius, low=0)
        if self.tol is not None:
            check_number("tol", self.tol, low=0)
        if self.n_codes is not None:
            check_number("n_codes", self.n_codes, low=1, whole=True)
        if self.shape is not None and self.n_codes is not None:
            raise ValueError(f"shape={self.shape!r} and n_codes={self.n_codes!r} were both given: give one of them")

    def _grid(self, passes: Passes) -> Grid:
        layout = {"topology": self.topology, "wrap": self.wrap}
        if self.shape is not None:
            sides = self.shape if isinstance(self.shape, (tuple, list)) else (self.shape,)
            grid = Grid(tuple(int(n) if isinstance(n, np.integer) else n for n in sides), **layout)
        elif self.n_codes is not None:
            grid = Grid.balanced(int(self.n_codes), **layout)
        else:
            side = max(2, round(math.sqrt(5 * math.sqrt(passes.distinct()))))
            # Rows that wrap must be even in number between hexagons.
            grid = Grid((side + side % 2 if self.topology == "hexagonal" else side, side), **layout)
        needed = 6 * grid.size * passes.dim * (8 if passes.dtype == torch.float64 else 4)
        memory = _memory(passes.device)
        if needed > memory:
            raise ValueError(
                f"a map of shape {grid.shape} with {passes.dim} features needs about {needed / 2**30:.1f} GiB, but "
                f"{passes.device} has {memory / 2**30:.1f}: use a smaller shape, fewer features, or float32 data"
            )
        return grid

    def _plan(self) -> _Plan:
        """The schedules of this fit. They end with the last pass, which has the end values throughout."""
        start = max(self.grid_.shape) / 2 if self.radius is None else float(self.radius)
        end = float(self.radius_end)
        start = max(start, end) if self.radius is None else start  # a map of one row of codes starts at its end
        if start < end:
            raise ValueError(f"radius={self.radius!r} must be at least radius_end={self.radius_end!r}: it falls")
        if self.learning_rate < self.learning_rate_end:
            raise ValueError(
                f"learning_rate={self.learning_rate!r} must be at least learning_rate_end={self.learning_rate_end!r}: "
                "it falls"
            )
        least = 1e-6 if self.schedule == "exponential" else 0.0
        steps = max(1, int(self.max_iter) - 1)
        # Neighborhood's gaussian is exp(-(d / width)^2); users of maps know the standard deviation.
        factor = math.sqrt(2) if self.neighborhood == "gaussian" else 1.0
        width = Schedule(self.schedule, start=factor * max(start, least), end=factor * max(end, least), steps=steps)
        rate = Schedule(
            self.schedule, start=max(float(self.learning_rate), least), end=max(float(self.learning_rate_end), least),
            steps=steps,
        )  # fmt: skip
        return _Plan(Neighborhood(self.neighborhood, self.grid_, schedule=width), width, rate, factor)

    # Reading the map

    def measures(self, X: Any, sample_weight: Any = None) -> dict[str, float]:
        """How good the map is for X: errors by the samples, order by the codes (see topovq.metrics).

        quantization_error, topographic_error, distortion (at the last radius), topographic_product and
        neighborhood_preservation.
        """
        passes = self._fitted_passes(X, sample_weight)
        with self._threads():
            codes_KD = self._codes(passes)
            told = passes.added(Errors(codes_KD, self.metric, self.grid_))
            check_weight(told)
            reach = Distortion(codes_KD, self.metric, self._plan().neighborhood, self.max_iter)
            distortion = passes.added(reach)["distortion"]
            everywhere = torch.from_numpy(self.codes_).double()
        return {
            "quantization_error": float(told["error"] / told["weight"]),
            "topographic_error": float(told["apart"] / told["weight"]),
            "distortion": float(distortion / told["weight"]),
            "topographic_product": float(metrics.topographic_product(everywhere, self.grid_)),
            "neighborhood_preservation": float(metrics.neighborhood_preservation(everywhere, self.grid_)),
        }

    def places(self, X: Any) -> Any:
        """The place on the map of each sample's closest code, int64 [N, axes]."""
        return like_input(self.grid_.coords(self._closest(X).cpu()), X)

    def _repr_html_inner(self) -> str:
        from topovq.som.notebook import html

        return html(self)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        """What a notebook shows; `sklearn.set_config(display="text")` leaves the text."""
        shown = {"text/plain": repr(self)}
        return {**shown, "text/html": self._repr_html_inner()} if get_config()["display"] == "diagram" else shown

    def plot(self, kind: str = "u_matrix", **options: Any) -> Any:
        """Draw the map and return the axes: one of the pictures of topovq.som.plots by its name."""
        from topovq.som import plots  # pyplot is slow to import and fitting has no use for it

        check_choice("kind", kind, plots.KINDS)
        return getattr(plots, kind)(self, **options)


@dataclass
class _Plan:
    """What a fit falls along: the neighborhood over time, its width, the learning rate, and width / radius."""

    neighborhood: Neighborhood
    width: Schedule
    rate: Schedule
    width_per_radius: float


def _recounted(running_KC: Tensor, codes_KD: Tensor, missing: bool) -> Tensor:
    """Running averages with one weight per feature made of ones with one per code, or the reverse (their mean)."""
    dim = codes_KD.shape[1]
    weights = running_KC[:, dim:].mean(1, keepdim=True)
    weights = weights.expand(-1, dim) if missing else weights
    return torch.cat([codes_KD * weights, weights], 1)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
