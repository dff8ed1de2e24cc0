# ruff: noqa: E402 (the number of threads is set before the imports)
"""Self-organizing maps side by side: the same data, map, passes and radius; one thread; one judge of the final codes.

    python benchmarks/som.py [--peers FOLDER] [--cases A B] [--repeats 3] [--only NAME ...]

A is 20,000 x 64 onto 20 x 20, B is 100,000 x 32 onto 30 x 30. All run 10 passes with a Gaussian neighborhood whose
sigma falls from half the side to 1 (torchsom's own rule falls by its own law, MiniSom learns online). Times are
CPU-seconds, the best of the repeats, everything a user waits for from data to a fitted map; all take turns, and what
takes over 2 s runs once. Errors
are those of topovq.metrics on the codes each one ends with. Peers are looked for among the installed packages, then in
FOLDER (`pip install --target FOLDER --no-deps minisom xpysom ...`); those that are not there are named.
"""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[name] = "1"  # read when the libraries below are loaded

import argparse
import contextlib
import csv
import importlib
import importlib.metadata
import io
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import sklearn
import torch
from rich.console import Console
from rich.table import Table
from sklearn.cluster import KMeans

from topovq import metrics
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood, Schedule
from topovq.ops.search import nearest
from topovq.ops.smooth import smooth
from topovq.som import SelfOrganizingMap
from topovq.tokenizer.training.record import environment

torch.set_num_threads(1)
CASES = {"A": (20_000, 64, 20), "B": (100_000, 32, 30)}
PASSES = 10
LONG = 2.0  # seconds of a run that is not repeated
RESULTS = Path(__file__).parent / "results" / "som.csv"
Fit = Callable[[np.ndarray, int], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="folder with more packages")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=7, help="runs of each, the long ones apart")
    parser.add_argument("--only", nargs="+", choices=list(FITS), metavar="NAME", help="of " + ", ".join(FITS))
    options = parser.parse_args()
    if options.peers:
        sys.path.append(options.peers)
    rows = []
    for case in options.cases:
        x_ND, side = make_data(case), CASES[case][2]
        runs = {}
        for name, (fit, package, most) in FITS.items():
            if options.only and name not in options.only:
                continue
            if find_version(package) is None:
                print(f"{name}: {package} is not installed, or not whole")
            elif len(x_ND) > most:
                print(f"{name}: left out of case {case}, where it would take minutes")
            else:
                runs[name] = partial(fit, x_ND, side)
        for name, (seconds, codes_KD) in in_turn(runs, options.repeats).items():
            rows.append({"measure": f"fit {case}", "name": name, "version": find_version(FITS[name][1])}
                        | {"seconds": seconds} | errors(x_ND, codes_KD, side))  # fmt: skip
        if not options.only:
            rows += predictions(case, x_ND, side, options.repeats) + lloyd(case, x_ND, side, options.repeats)
    show(rows)
    append(rows)


def make_data(case: str) -> np.ndarray:
    """A bent sheet of 4 dimensions in D, with noise: float32, the same every time."""
    n, dim, _ = CASES[case]
    generator = np.random.default_rng(0)
    latent = generator.standard_normal((n, 4))
    bent = np.tanh(latent @ generator.standard_normal((4, dim)) / 2) * 2
    return (bent + 0.3 * generator.standard_normal((n, dim))).astype(np.float32)


def in_turn(runs: dict[str, Callable[[], np.ndarray]], repeats: int) -> dict[str, tuple[float, np.ndarray]]:
    """(fewest CPU-seconds, last result) of each; they take turns, so that other load on the machine hits all alike."""
    best: dict[str, float] = {}
    results = {}
    for _ in range(repeats):
        for name, run in runs.items():
            if best.get(name, 0) > LONG:
                continue
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                start = time.process_time()
                results[name] = run()
                best[name] = min(best.get(name, float("inf")), time.process_time() - start)
    return {name: (best[name], results[name]) for name in runs}


def errors(x_ND: np.ndarray, codes_KD: np.ndarray, side: int) -> dict[str, float]:
    x, codes = torch.from_numpy(x_ND), torch.from_numpy(np.ascontiguousarray(codes_KD, dtype=np.float32))
    return {
        "quantization_error": round(float(metrics.quantization_error(x, codes)), 4),
        "topographic_error": round(float(metrics.topographic_error(x, codes, Grid((side, side)))), 4),
    }


# The libraries


def fit_topovq(x_ND: np.ndarray, side: int) -> np.ndarray:
    return SelfOrganizingMap((side, side), max_iter=PASSES, device="cpu").fit(x_ND).codes_


def fit_topovq_online(x_ND: np.ndarray, side: int) -> np.ndarray:
    som = SelfOrganizingMap((side, side), rule="online", max_iter=PASSES, device="cpu", random_state=0)
    return som.fit(x_ND).codes_


def fit_plain_torch(x_ND: np.ndarray, side: int) -> np.ndarray:
    """What a good hand would write in twenty lines: no checks, no errors, no labels; a random start."""
    x = torch.from_numpy(x_ND)
    codes = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: side * side]].clone()
    schedule = Schedule.exponential(side / 2**0.5, 2**0.5, PASSES - 1)
    neighborhood = Neighborhood("gaussian", Grid((side, side)), schedule=schedule)
    buffer = torch.empty(1024, side * side)
    index = torch.empty(len(x), dtype=torch.int64)
    for step in range(PASSES):
        bias, w = codes.square().sum(1) / 2, -codes.T.contiguous()
        for start in range(0, len(x), 1024):
            block = x[start : start + 1024]
            score = torch.addmm(bias, block, w, out=buffer[: len(block)])
            index[start : start + 1024] = torch.from_numpy(score.numpy().argmin(1))
        sums = torch.zeros_like(codes).index_add_(0, index, x)
        counts = torch.bincount(index, minlength=side * side).float()
        sums, counts = smooth(sums, counts, neighborhood, torch.tensor(step))
        codes = sums / counts[:, None]
    return codes.numpy()


def fit_xpysom(x_ND: np.ndarray, side: int) -> np.ndarray:
    from xpysom import XPySom

    som = XPySom(side, side, x_ND.shape[1], sigma=side / 2, sigmaN=1, std_coeff=1.0, random_seed=0, xp=np)
    som.random_weights_init(x_ND)
    som.train(x_ND, PASSES)
    return som.get_weights().reshape(side * side, -1)


def fit_intrasom(x_ND: np.ndarray, side: int) -> np.ndarray:
    import intrasom

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it writes files where it runs
        som = intrasom.SOMFactory.build(
            x_ND, mapsize=(side, side), mapshape="planar", lattice="rect", normalization=None, initialization="random"
        )
        som.train(
            n_job=1, save=False, summary=False, train_rough_len=PASSES - 1, train_rough_radiusin=side / 2,
            train_rough_radiusfin=1, train_finetune_len=1, train_finetune_radiusin=1, train_finetune_radiusfin=1,
        )  # fmt: skip
    return np.asarray(som.codebook.matrix)


def fit_torchsom(x_ND: np.ndarray, side: int) -> np.ndarray:
    from torchsom import SOM

    som = SOM(side, side, x_ND.shape[1], epochs=PASSES, batch_size=256, sigma=side / 2,
              sigma_decay_function="sig_inverse_decay_to_one", device="cpu", random_seed=0)  # fmt: skip
    som.initialize_weights(torch.from_numpy(x_ND), mode="pca")
    som.fit(torch.from_numpy(x_ND), verbose=False)
    return som.weights.detach().numpy().reshape(side * side, -1)


def fit_somoclu(x_ND: np.ndarray, side: int) -> np.ndarray:
    import somoclu

    som = somoclu.Somoclu(side, side, compactsupport=False, std_coeff=1.0, initialization="random", data=x_ND)
    som.train(epochs=PASSES, radius0=side / 2, radiusN=1, scale0=1.0, scaleN=1.0)
    return som.codebook.reshape(side * side, -1)


def fit_minisom(x_ND: np.ndarray, side: int) -> np.ndarray:
    from minisom import MiniSom

    som = MiniSom(side, side, x_ND.shape[1], sigma=side / 2, learning_rate=0.5, random_seed=0,
                  sigma_decay_function="linear_decay_to_one", decay_function="linear_decay_to_zero")  # fmt: skip
    som.random_weights_init(x_ND)
    som.train_random(x_ND, PASSES * len(x_ND))
    return som.get_weights().reshape(side * side, -1)


def fit_kmeans(x_ND: np.ndarray, side: int) -> np.ndarray:
    start = x_ND[np.random.default_rng(0).choice(len(x_ND), side * side, replace=False)]
    return KMeans(side * side, init=start, n_init=1, max_iter=PASSES, tol=0).fit(x_ND).cluster_centers_


# name: (fit, the package it needs, the most samples it is run with)
FITS: dict[str, tuple[Fit, str, float]] = {
    "topovq batch": (fit_topovq, "topovq", float("inf")),
    "plain torch batch": (fit_plain_torch, "torch", float("inf")),
    "xpysom": (fit_xpysom, "xpysom", float("inf")),
    "intrasom": (fit_intrasom, "intrasom", float("inf")),
    "torchsom": (fit_torchsom, "torchsom", float("inf")),
    "somoclu": (fit_somoclu, "somoclu", float("inf")),
    "topovq online": (fit_topovq_online, "topovq", 20_000),
    "minisom online": (fit_minisom, "minisom", 20_000),
    "scikit-learn KMeans": (fit_kmeans, "scikit-learn", float("inf")),
}


# Winners for new data, and K-means


def predictions(case: str, x_ND: np.ndarray, side: int, repeats: int) -> list[dict[str, object]]:
    """Closest codes of all samples: topovq, and scikit-learn's KMeans with the same codes."""
    som = SelfOrganizingMap((side, side), max_iter=PASSES, device="cpu").fit(x_ND)
    kmeans = KMeans(side * side, init=som.codes_, n_init=1, max_iter=1).fit(x_ND)
    kmeans.cluster_centers_ = som.codes_
    runs = {"topovq": partial(som.predict, x_ND), "scikit-learn KMeans": partial(kmeans.predict, x_ND)}
    return [
        {"measure": f"predict {case}", "name": name, "version": find_version(name.split()[0]), "seconds": seconds}
        for name, (seconds, _) in in_turn(runs, repeats).items()
    ]


def lloyd(case: str, x_ND: np.ndarray, side: int, repeats: int) -> list[dict[str, object]]:
    """K-means as the map without a neighborhood, and scikit-learn's: one start, seconds per iteration, inertia."""
    start = x_ND[np.random.default_rng(0).choice(len(x_ND), side * side, replace=False)]
    som = SelfOrganizingMap(side * side, neighborhood="none", init=start, max_iter=PASSES, device="cpu")
    kmeans = KMeans(side * side, init=start, n_init=1, max_iter=PASSES, tol=0, algorithm="lloyd")
    runs = {
        "topovq none": lambda: som.fit(x_ND).codes_,
        "scikit-learn KMeans": lambda: kmeans.fit(x_ND).cluster_centers_,
    }
    return [
        {"measure": f"k-means iteration {case}", "name": name, "version": find_version(name.split()[0]),
         "seconds": seconds / PASSES, "inertia": round(inertia_of(x_ND, codes_KD), 1)}
        for name, (seconds, codes_KD) in in_turn(runs, repeats).items()
    ]  # fmt: skip


def inertia_of(x_ND: np.ndarray, codes_KD: np.ndarray) -> float:
    x, codes = torch.from_numpy(x_ND), torch.from_numpy(codes_KD)
    return float((x - codes[nearest(x, codes)]).double().square().sum())


# Records


def find_version(package: str) -> str | None:
    module = {"scikit-learn": "sklearn", "somoclu": "somoclu.somoclu_wrap"}.get(package, package)  # its compiled part
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            importlib.import_module(module)
        return importlib.metadata.version(package)
    except ImportError:
        return None


def facts() -> dict[str, object]:
    with open("/proc/cpuinfo") as file:
        cpu = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    return {
        "date": datetime.now(UTC).date().isoformat(), "cpu": cpu, "threads": torch.get_num_threads(),
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        "sklearn": sklearn.__version__,
    }  # fmt: skip


def commit() -> dict[str, object]:
    """Of the code that was measured, for files that have a column for it."""
    return {"commit": environment(torch.device("cpu"), 1)["commit"]}


def show(rows: list[dict[str, object]]) -> None:
    table = Table("measure", "library", "version", "CPU-seconds", "QE", "TE", "inertia")
    for row in rows:
        numbers = [str(row.get(key, "")) for key in ("quantization_error", "topographic_error", "inertia")]
        table.add_row(str(row["measure"]), str(row["name"]), str(row["version"]), f"{row['seconds']:.4g}", *numbers)
    Console(width=120).print(table)


def append(rows: list[dict[str, object]]) -> None:
    columns = [*facts(), "measure", "name", "version", "seconds", "quantization_error", "topographic_error", "inertia"]
    fresh = not RESULTS.exists()
    with open(RESULTS, "a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        if fresh:
            writer.writeheader()
        for row in rows:
            writer.writerow(facts() | row | {"seconds": f"{row['seconds']:.5g}"})


if __name__ == "__main__":
    main()
