"""The tables and sentences of docs/speed.md, from the CSV files alone.

Each block of the page (written.py) is made by the function of that name in BLOCKS, so that no figure on the page is
typed by hand; `python -m benchmarks.plots` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.kernels import BESIDE
from benchmarks.measured import (
    CONTENTION,
    FIRST,
    GRAPHED,
    LAYER_IN,
    MEMORY_GIB,
    OURS,
    PEERS,
    SHAPES,
    SLOWER,
    SMALL,
    STEP_TARGETS,
    TARGETS,
    Results,
    Row,
    Shape,
    need,
)
from benchmarks.written import BLOCK, goal, listed, met, mib, more, ms, named, prose, table, times


def measured(results: Results) -> str:
    """Where the figures come from, as the files say it."""

    def of(rows: list[Row], column: str) -> str:
        return listed(row[column] for row in rows)

    layers, steps = results.layers, [*results.training, *results.kernels, *results.scale, *results.at_once]

    def commits(rows: list[Row]) -> str:
        return listed(row["commit"][:7] for row in rows)

    versions = [of(steps, f"version_{name}") for name in ("torch", "triton")]
    rows = [
        ["layers.csv", *(of(layers, name) for name in ("gpu", "torch", "triton")), commits(layers), of(layers, "date")],
        ["training.csv, kernels.csv, scale.csv, at_once.csv", of(steps, "hardware"), *versions, commits(steps), ""],
    ]
    peer = of(steps, "version_vector-quantize-pytorch")
    text = f"""Driver {of(layers, "driver")}, CUDA {of(steps, "version_cuda")}, Python {of(steps, "version_python")},
        vector-quantize-pytorch {peer} (as training.csv has it). The files of the steps hold no date, and no file holds
        the version of flash-kmeans."""
    return table(["file", "GPU", "torch", "triton", "commit", "date"], rows) + "\n" + prose(text)


def short(results: Results) -> str:
    """The best peer of each shape beside this layer."""
    rows, slower = [], []
    for shape in SHAPES:
        eager, graph = results.ours("exact", "hard", shape), results.ours("exact+graph", "hard", shape)
        memory = mib(results.ours("exact", "hard", shape, column="peak_mib"))
        ran = {library: value for library in PEERS if (value := results.peer(library, shape)) is not None}
        slower += [f"{PEERS[name]} at {named(shape)}" for name, value in ran.items() if value < eager]
        if ran:
            best = min(ran, key=ran.__getitem__)
            peak = results.peer(best, shape, "peak_mib")
            assert peak is not None
            theirs = [PEERS[best], ms(ran[best]), mib(peak)]
            ratio = [times(ran[best] / eager), times(ran[best] / graph)]
        else:
            theirs, ratio = ["none ran", "", ""], ["", ""]
        rows.append([named(shape), *theirs, ms(eager), ratio[0], ms(graph), ratio[1], memory])
    head = [
        "N x K x d",
        "fastest peer",
        "its ms",
        "its MiB",
        "topovq eager ms",
        "faster",
        "in a graph ms",
        "faster",
        "MiB",
    ]
    text = f"Eager against eager, these are faster than topovq: {'; '.join(slower)}." if slower else (
        "Eager against eager, no peer is faster at any of these shapes."
    )  # fmt: skip
    return table(head, rows) + "\n" + prose(text)


def missing(library: str, shape: Shape) -> str:
    """Why the benchmark left a peer out, by its own rule: three tensors N x K, and K x K for the one-hot form."""
    n, k, _ = shape
    need = 3 * 4 * (n * k + (k * k if library == "authors-formulation" else 0)) / 2**30
    return f"did not fit: over {need:,.0f} GiB" if need > MEMORY_GIB else "left out: over 5 s"


def layers(results: Results) -> str:
    """A table for each shape."""
    parts = []
    for shape in SHAPES:
        rows = []
        for kind, precision in OURS:
            figures = [results.ours(mode, kind, shape) for mode in (precision, precision + "+graph")]
            peak = results.ours(precision, kind, shape, column="peak_mib")
            floor = results.ours(precision, kind, shape, column="roofline_ms")
            rows.append([f"topovq, `{kind}`, {precision}", *map(ms, figures), mib(peak), ms(floor)])
        for library, name in PEERS.items():
            columns = ("median_ms", "peak_mib", "roofline_ms")
            found = [value for column in columns if (value := results.peer(library, shape, column)) is not None]
            if found:
                rows.append([name, ms(found[0]), "", mib(found[1]), ms(found[2])])
            else:
                rows.append([name, missing(library, shape), "", "", ""])
        title = "### N = {:,}, K = {:,}, d = {}\n\n".format(*shape)
        parts.append(title + table(["layer", "eager ms", "in a graph ms", "peak MiB", "floor ms"], rows))
    return "\n".join(parts)


def targets(results: Results) -> str:
    """Targets beside figures, and which were missed."""
    rows, missed = [], []
    for shape, precision, kinds, most_ms, most_mib in TARGETS:
        slow: dict[str, str] = {}
        large: dict[str, str] = {}
        for kind in kinds:
            eager, graph = results.ours(precision, kind, shape), results.ours(precision + "+graph", kind, shape)
            peak = results.ours(precision, kind, shape, column="peak_mib")
            rows.append(
                [
                    *(named(shape), f"`{kind}`, {precision}", goal(most_ms), ms(graph), met(graph, most_ms)),
                    *(ms(eager), met(eager, most_ms), goal(most_mib), mib(peak), met(peak, most_mib)),
                ]
            )
            slow |= {f"`{kind}`": f"{ms(graph)} ms"} if graph > most_ms else {}
            large |= {f"`{kind}`": f"{mib(peak)} MiB"} if peak > most_mib else {}
        for what, found, most in (("time", slow, most_ms), ("memory", large, most_mib)):
            if found:
                each = ", ".join(f"{kind} {value}" for kind, value in found.items())
                missed.append(f"- Missed: {what} at {named(shape)}, {precision}, target {goal(most)}: {each}.\n")
    head = ["N x K x d", "topovq", "target ms", "in a graph", "met", "eager", "met", "target MiB", "peak", "met"]
    return table(head, rows) + "\n" + ("".join(missed) or "All are met in a graph.\n")


def floors(results: Results) -> tuple[dict[Shape, tuple[float, float]], float]:
    """The floor of each shape (exact, fast), and the ms that one float16 product of N x K x d = 1 takes.

    Exact needs three products and fast one, while the bytes are the same: where the floors differ by three, products
    set both.
    """
    found = {
        shape: (
            results.ours("exact", "hard", shape, column="roofline_ms"),
            results.ours("fast", "hard", shape, column="roofline_ms"),
        )
        for shape in SHAPES
    }
    shape = max(found, key=lambda one: found[one][1])
    return found, found[shape][1] / (shape[0] * shape[1] * shape[2])


def limit(exact: float, fast: float) -> str:
    if abs(exact - fast) <= 0.01 * exact:
        return "bytes"
    return "products" if abs(exact - 3 * fast) <= 0.01 * exact else "products exact, bytes fast"


def limits(results: Results) -> str:
    """The floors, how far the steps are from them, and the search alone beside flash-kmeans."""
    found, product = floors(results)
    rows = []
    beaten: dict[str, list[str]] = {"exact": [], "fast": []}
    for shape, (exact, fast) in found.items():
        search = [need(results.search("topovq", mode, shape)) for mode in ("exact", "fast")]
        flash = [results.search("flash-kmeans", mode, shape) for mode in ("tf32", "fp16")]
        step = [results.ours(mode + "+graph", "hard", shape) for mode in ("exact", "fast")]
        for mode, mine, theirs in zip(beaten, search, flash):
            beaten[mode] += [named(shape)] if theirs is not None and theirs < mine else []
        rows.append(
            [
                *(named(shape), limit(exact, fast), f"{ms(exact)} / {ms(fast)}", f"{ms(step[0])} / {ms(step[1])}"),
                f"{times(step[0] / exact)} / {times(step[1] / fast)}",
                *(ms(search[0]), ms(search[1]), *("" if value is None else ms(value) for value in flash)),
            ]
        )
    head = [
        *("N x K x d", "floor set by", "floor exact / fast", "`hard` in a graph", "over the floor"),
        *("search exact", "search fast", "flash-kmeans tf32", "flash-kmeans fp16"),
    ]
    n, k, d = FIRST
    floor = found[FIRST][1]
    once = product * n * k * d
    exact, fast = (need(results.search("topovq", mode, FIRST)) for mode in ("exact", "fast"))
    searches = (("topovq", "exact"), ("topovq", "fast"), ("flash-kmeans", "tf32"), ("flash-kmeans", "fp16"))
    eager = [
        named(shape)
        for shape in found
        if any(results.layer(name, mode + "+graph", "none", shape, "assignment") is None for name, mode in searches)
    ]
    how = "in a graph" + (
        f" (at {', '.join(eager)} eagerly, or some of them, with the time to launch)" if eager else ""
    )
    text = f"""Searches are timed alone, {how}, on float32 vectors except for flash-kmeans fp16, which takes float16. At
        {named(FIRST)} ours takes {ms(exact)} ms exact and {ms(fast)} fast. Its products would take {ms(3 * once)} and
        {ms(once)} ms at the measured rate, and the bytes of the step {ms(floor)} ms."""
    tf32, fp16 = (", ".join(shapes) or "no shape" for shapes in beaten.values())
    other = f"""flash-kmeans searches faster with TF32 than topovq exact at {tf32}, and with float16 vectors than topovq
        fast at {fp16}."""
    ordered = {
        named(shape): value / need(results.search("topovq", "exact", shape))
        for shape in found
        if (value := results.layer("topovq", "exact+graph", "none", shape, "assignment, ordered codes")) is not None
    }
    if ordered:
        other += f""" On codes in the order of a map, as after training, the exact search takes
            {", ".join(f"{ratio:.2f}x as long at {where}" for where, ratio in ordered.items())}."""
    return table(head, rows) + "\n" + prose(text) + "\n" + prose(other)


def accumulation(results: Results) -> str:
    """One popular code against codes chosen alike."""
    rows, dearer = [], []
    for shape in SHAPES:
        cells, uniform = [], []
        for mode in ("atomic", "deterministic"):
            alike, one = (results.ours(mode, "none", shape, f"accumulate, {what}") for what in ("uniform", "one code"))
            cells += [ms(alike), ms(one), f"{one / alike:.2f}x", met(one / alike, CONTENTION)]
            uniform.append(alike)
        dearer.append(uniform[1] / uniform[0])
        rows.append([named(shape), *cells])
    within = f"<= {goal(CONTENTION)}x"
    head = [
        *("N x K x d", "uniform ms", "one code ms", "ratio", within),
        *("deterministic: uniform ms", "one code ms", "ratio", within),
    ]
    text = f"""On codes chosen alike, the deterministic option takes {times(min(dearer))} to {times(max(dearer))} the
        time of the default."""
    return table(head, rows) + "\n" + prose(text)


def eager(results: Results) -> str:
    """What launching costs: the same step eager and in a graph, with few vectors and with many."""
    rows = []
    for kind, precision in OURS:
        cells = []
        for shape in (SMALL, FIRST):
            slow, quick = (results.ours(mode, kind, shape) for mode in (precision, precision + "+graph"))
            cells += [ms(slow), ms(quick), times(slow / quick)]
        rows.append([f"topovq, `{kind}`, {precision}", *cells])
    for library, name in PEERS.items():
        cells = []
        for shape in (SMALL, FIRST):
            value = results.peer(library, shape)
            cells += [missing(library, shape) if value is None else ms(value), "", ""]
        rows.append([name, *cells])
    head = ["layer"]
    for shape in (SMALL, FIRST):
        head += [f"N = {shape[0]:,} eager ms", "in a graph ms", "ratio"]
    slow, quick = results.ours("exact", "hard", SMALL), results.ours("exact+graph", "hard", SMALL)
    text = f"""At N = {SMALL[0]:,} the device's work takes {ms(quick)} ms (`hard`, exact, in a graph) and the eager
        step {ms(slow)} ms: the other {1 - quick / slow:.0%} are spent on launching. With {FIRST[0] // SMALL[0]} times
        the vectors the eager step takes {ms(results.ours("exact", "hard", FIRST))} ms."""
    peers = {name: value for library, name in PEERS.items() if (value := results.peer(library, SMALL)) is not None}
    for verb, names in (
        ("faster", [f"{name} ({ms(value)} ms)" for name, value in peers.items() if value < slow]),
        ("slower", [f"{name} ({ms(value)} ms)" for name, value in peers.items() if value >= slow]),
    ):
        text += f" Eager and {verb} there than eager topovq: {', '.join(names)}." if names else ""
    return table(head, rows) + "\n" + prose(text)


def training(results: Results) -> str:
    """Whole steps, their targets, and what the layer alone takes at the shape it has in the model."""
    rows = []
    for row in results.training:
        graphed = row["way"] == GRAPHED
        target = STEP_TARGETS[row["case"]]
        aim = [goal(target), met(float(row["ms"]), target)] if graphed else ["", ""]
        figures = [ms(float(row["ms"])), ms(float(row["ms_fastest"])), *aim]
        rest = [f"{float(row['images_per_second']):,.0f}", mib(float(row["peak_mib"])), mib(float(row["reserved_mib"]))]
        rows.append([row["case"], row["quantizer"], row["way"], *figures, *rest, row["commit"][:7]])
    head = [
        "model",
        "quantizer",
        "run",
        "ms",
        "fastest",
        "target",
        "met",
        "images a second",
        "peak MiB",
        "reserved MiB",
        "commit",
    ]
    lines = []
    for case, target in STEP_TARGETS.items():
        shape, where = LAYER_IN[case]
        rows_of = [row for row in results.training if row["case"] == case and row["way"] == GRAPHED]
        found = [float(row["ms"]) for row in rows_of if row["quantizer"].split()[0] in ("ema", "kohonen")]
        said = "met" if max(found) <= target else "missed" if min(found) > target else "met by some"
        alone = ms(results.ours("exact+graph", "hard", shape))
        between = " to ".join(dict.fromkeys((ms(min(found)), ms(max(found)))))
        lines.append(
            f"- {case}: target {goal(target)} ms; EMA-VQ and KSOM {between}: **{said}**.\n"
            f"  The layer alone takes {alone} ms {where} (float32, `hard`, exact, in a graph).\n"
        )
    return table(head, rows) + "\n" + "".join(lines)


def kernels(results: Results) -> str:
    """What fills the step of the larger model."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in results.kernels:
        found.setdefault(row["kind"], []).append((float(row["ms"]), float(row["calls"])))
    total = {name: (sum(ms for ms, _ in some), sum(calls for _, calls in some)) for name, some in found.items()}
    rows = [
        [name, ms(taken), f"{calls:,.0f}"]
        for name, (taken, calls) in sorted(total.items(), key=lambda each: -each[1][0])
    ]
    inside = {name: figures for name, figures in total.items() if name != BESIDE}
    taken, calls = (sum(column) for column in zip(*inside.values()))
    (case,) = {row["case"] for row in results.kernels}
    commits = listed(row["commit"][:7] for row in results.kernels)
    text = f"""Without the copy, which runs beside the rest, the {calls:,.0f} kernels of a step take {ms(taken)} ms,
        {total["convolutions"][0] / taken:.0%} of it for convolutions
        ([kernels.csv](../benchmarks/results/kernels.csv), {case}, commit {commits})."""
    return table(["kernels", "ms a step", "calls"], rows) + "\n" + prose(text)


def scale(results: Results) -> str:
    """A training step over codebook sizes, and how much slower than EMA-VQ each is."""
    rows = []
    shares: dict[str, dict[int, float]] = {"kohonen hard": {}, "kohonen": {}, "kohonen at 0.75": {}}
    for size in dict.fromkeys(int(row["codebook_size"]) for row in results.scale):
        at = {row["quantizer"]: float(row["ms"]) for row in results.scale if int(row["codebook_size"]) == size}
        peaks = {row["quantizer"]: row["peak_mib"] for row in results.scale if int(row["codebook_size"]) == size}
        cells = [f"{size:,}", ms(at["ema"])]
        at["kohonen"] = max(taken for name, taken in at.items() if name.split(" at ")[0] == "kohonen")
        for name, found in shares.items():
            found[size] = at[name] / at["ema"] - 1
            cells += [ms(at[name]), more(found[size]), *([met(found[size], SLOWER)] * (" at " not in name))]
        rows.append([*cells, *(mib(float(peaks[name])) for name in ("ema", "kohonen hard", "kohonen"))])
    within = f"<= {100 * SLOWER:.0f}%"
    head = [
        *("K", "ema ms", "hard ms", "over ema", within, "recommended ms, at most", "over ema", within),
        *("narrow ms", "over ema", "ema MiB", "hard MiB", "recommended MiB"),
    ]
    text = f"KSOM was to be at most {100 * SLOWER:.0f}% slower than EMA-VQ at every K."
    for name, said in (("kohonen hard", "`hard`"), ("kohonen", "the recommended one")):
        beyond = [f"{size:,} ({more(share)})" for size, share in shares[name].items() if share > SLOWER]
        text += f" Beyond that at its most: {said} at {', '.join(beyond)}." if beyond else f" Within that: {said}."
    means = {size: (share + shares["kohonen at 0.75"][size]) / 2 for size, share in shares["kohonen"].items()}
    size = max(means, key=lambda size: means[size])
    text += " Half of a training is narrow, so over a whole one the recommended one is at most"
    text += f" {more(means[size])} slower, which is at {size:,} codes."
    return table(head, rows) + "\n" + prose(text)


def at_once(results: Results) -> str:
    """Several runs that share the device."""
    alone = float(results.at_once[0]["ms_per_step_of_a_run"])
    rows = []
    for row in results.at_once:
        value = float(row["ms_per_step_of_a_run"])
        rows.append([row["runs"], ms(value), f"{alone / value:.2f}x"])
    return table(["runs", "ms for a step of one run", "steps a second, against one run"], rows)


def cpu(results: Results) -> str:
    """The search on a CPU beside the whole N x K matrix."""
    rows = []
    for row in results.layers_cpu:
        if row["library"] != "topovq":
            continue
        same = [other for other in results.layers_cpu if other["library"] == "plain-torch"
                and all(other[name] == row[name] for name in ("mode", "N", "K", "d"))]  # fmt: skip
        mine, whole = float(row["median_ms"]), float(same[0]["median_ms"])
        shape = (int(row["N"]), int(row["K"]), int(row["d"]))
        cells = [named(shape), row["mode"].split("-")[1], ms(mine), ms(whole), times(whole / mine)]
        rows.append([*cells, *(f"{float(found['peak_mib']):,.0f}" for found in (row, same[0]))])
    facts = [listed(row[name] for row in results.layers_cpu) for name in ("driver", "torch", "commit", "date")]
    head = ["N x K x d", "threads", "topovq ms", "N x K matrix ms", "faster", "topovq MiB", "N x K matrix MiB"]
    return table(head, rows) + "\n" + prose("Processor {}, torch {}, commit {}, {}.".format(*facts))


BLOCKS: dict[str, Callable[[Results], str]] = {
    block.__name__: block
    for block in (measured, short, layers, targets, limits, accumulation, eager, training, kernels, scale, at_once, cpu)
}


def filled(page: str, results: Results) -> str:
    """The page with every block made anew."""
    there = [found[1] for found in BLOCK.finditer(page)]
    if sorted(there) != sorted(BLOCKS):
        raise ValueError(f"the page has the blocks {there}; it should have each of {list(BLOCKS)} once")

    def made(found: re.Match[str]) -> str:
        return f"<!-- begin {found[1]} -->\n\n{BLOCKS[found[1]](results)}\n<!-- end {found[1]} -->"

    return BLOCK.sub(made, page)
