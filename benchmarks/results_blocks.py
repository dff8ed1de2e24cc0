"""The tables and sentences of docs/results.md, from records and measures alone.

A block of the page is what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. Each is made by the function
of that name in BLOCKS; `python -m benchmarks.results_page` writes them. Of what was not run a block says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.results_made import SHOWN, Made, Source
from benchmarks.results_words import anchor, best_loss, kind, listed, mean, need, numbers, seeds_of, values, verdict
from benchmarks.written import BLOCK, prose, table
from experiments.rows import Row
from experiments.sheet import markdown
from experiments.targets import IMAGES, other_data
from topovq.tokenizer.training import TrainConfig

NAMES = {"cifar10": "CIFAR-10", "celebahq_afhq": "faces", "imagenet": "ImageNet"}
TITLES = {"celebahq_afhq": "Faces at 256x256", "imagenet": "ImageNet at 256x256"}
OFFSETS = (-10, -5, -3, -2, -1, 1, 2, 3, 5, 10)  # shown of what was measured
# Of the figures at 256x256: what stands where the picture cannot be seen
PICTURES = {
    "initialization": "Validation loss over training for initial counts 0 and 1, EMA-VQ and KSOM",
    "perplexity": "Perplexity of the top and of the bottom tokens over training",
    "maps2": "Both codebooks decoded code by code, the other level held at one code, KSOM above EMA-VQ",
    "topography": "Topographic error and the distance of neighboring codes on both levels, KSOM and EMA-VQ",
    "shifts": "Two images with the tokens of both levels, of the top and of the bottom moved by -3 to 3 places, KSOM "
    "above EMA-VQ",
    "shifts-wide": "One image with its tokens moved by -10 to 10 places, KSOM above EMA-VQ",
    "shift-psnr": "PSNR over the offset, for both levels, the top alone and the bottom alone",
}


def runs(source: Source) -> str:
    """What was run, where, and how long it took; and what was not."""
    made, found = source.tables("cifar10"), source.runs("cifar10")
    seeds = numbers([row.n for one in made for row in one.rows], 0)
    together = [run.config.get("at_once") or 1 for run in found]
    share = [run.lines[-1]["seconds"] / number for run, number in zip(found, together)]
    text = f"""{len(found)} runs on CIFAR-10 with 512 codes and the paper's settings: the tables
        {listed(f"`{one.table}`" for one in made)}, {found[0].config["steps"]:,} steps, {seeds} seeds a cell (the paper
        has ten), {values(found, "precision")}, on one {values(found, "hardware")}. They were trained
        {numbers(together, 0)} at a time, and then took {numbers(share, 0)} s of the GPU
        each."""
    for dataset in TITLES:
        if there := source.runs(dataset):
            text += f""" At 256x256, {len(there)} runs of a VQ-VAE-2 on {NAMES[dataset]},
                {values(there, "steps", ",")} steps: see [{TITLES[dataset]}](#{anchor(TITLES[dataset])})."""
    lacking = [f"the table `{name}`" for name in SHOWN["cifar10"] if source.made(name) is None]
    lacking += [f"everything at 256x256 on {NAMES[dataset]}" for dataset in TITLES if not source.runs(dataset)]
    return prose(text) + ("\n" + prose(f"Not run: {listed(lacking)}.") if lacking else "")


def summary(source: Source) -> str:
    """The paper's claims that are about CIFAR-10, and whether they hold here."""
    main, robustness = need(source.made("main")), need(source.made("robustness"))
    bad, good = (robustness.loss(method, "N=0", "empty=no") for method in ("ema", "ksom"))
    worse, well = (robustness.loss(method, "N=1", "empty=no") for method in ("ema", "ksom"))
    ends = [main.loss(*kind(row)) for row in main.rows]
    ema20, ema10 = (main.mean(name, "ema") for name in ("steps20", "steps10"))
    hard20, hard10 = (main.mean(name, "hard") for name in ("steps20", "steps10"))
    ksom20 = {row.cell.neighborhood: main.mean("steps20", *kind(row)) for row in main.rows if row.cell.method == "ksom"}
    sooner = [f"`{name}` is ({value:.1f})" for name, value in ksom20.items() if value < ema20]
    others = [f"`{name}` is not ({value:.1f})" for name, value in ksom20.items() if value >= ema20]
    paper = [(row, row.paper()["loss"]) for row in main.rows]
    percent = [100 * (main.loss(*kind(row)) / told.mean - 1) for row, told in paper if told]
    differ = f"by {numbers(percent, 1, '+')}%"
    if max(percent) < 0:
        differ = f"lower, EMA-VQ and KSOM alike, by {numbers([-value for value in percent], 1)}%"
    larger = ""
    if source.picture("shifts", "celebahq_afhq") and source.picture("shifts", "imagenet"):  # looked at, not computed
        larger = (
            "; at 256x256 by three places on [faces](#faces-at-256x256), by two on [ImageNet](#imagenet-at-256x256)"
        )
    near = {row["method"]: float(row["neighbor_ratio"]) for row in source.measured("topography", "cifar10")}
    rows = [
        [
            "EMA-VQ collapses from `count_init` 0 without updates of empty clusters; KSOM does not",
            f"{verdict(bad > 2 * good)}: {bad:.0f} and {good:.1f}, see [robustness](#robustness)",
        ],
        [
            "EMA-VQ from `count_init` 1 without those updates is worse; KSOM is not",
            f"{verdict(worse > 1.1 * well)}: {worse:.1f} and {well:.1f}",
        ],
        [
            "well configured, all methods reach about the same loss",
            f"{verdict(max(ends) < 1.05 * min(ends))}: {numbers(ends, 1)}, see [main](#main)",
        ],
        [
            "KSOM is sooner within 20% of its best loss",
            f"thousands of steps, EMA-VQ {ema20:.1f}: {', '.join([*sooner, *others])}",
        ],
        [
            "at 10% little of that is left",
            f"{verdict(abs(hard10 - ema10) < abs(hard20 - ema20))}: {hard10:.1f} (`hard`) and {ema10:.1f} (EMA-VQ)",
        ],
        [
            "loss of EMA-VQ 51.9, of KSOM 51.8 to 52.1",
            f"{differ}: see [the losses](#the-losses)",
        ],
        [
            "KSOM's codes are ordered on the map",
            f"{verdict(near['KSOM'] < 0.8 < near['EMA-VQ'])}: see [the map](#the-map)",
        ],
        [
            "images stay recognizable when tokens are moved a little on it",
            "on CIFAR-10 by one place, mostly, by three hardly: see [shifted tokens](#shifted-tokens)" + larger,
        ],
    ]
    return table(["the paper says", "here"], rows)


def shown(made: Made) -> str:
    """A table with its caption, the command that prints it and its CSV file."""
    link = f"[CSV](results/{made.sheet.name}.csv)"
    return f"{markdown(made.sheet)}\n```\n{made.command}\n```\n\n{link}\n"


def sensitivity(source: Source) -> str:
    made = need(source.made("sensitivity"))
    row = made.row("ema", "N=0", "empty=no")
    best = [1e3 * min(line["loss"] for line in run.validations() if line["loss"] is not None) for run in row.runs]
    used = [round(run.config["codebook_size"] * run.validations()[-1]["usage"]) for run in row.runs]
    text = f"""The best losses with `count_init` 0 and no updates of empty clusters are
        {listed(f"{loss:.1f}" for loss in best)}, with {listed(map(str, used))} of the
        {row.runs[0].config["codebook_size"]} codes in use at the end (seeds 0 to {row.n - 1})."""
    return shown(made) + "\n" + prose(text)


def initialization(source: Source) -> str:
    """Where the curves of N = 0 and N = 1 end."""
    table = need(source.made("sensitivity"))
    runs = {name: source.seeds_of(table.row("ema", f"N={name}", "empty=yes").cell) for name in "01"}
    first, last = (
        {name: [1e3 * run.validations()[which]["loss"] for run in found] for name, found in runs.items()}
        for which in (0, -1)
    )
    text = f"""With N = 0 and updates, EMA-VQ's loss is {numbers(first["0"], 0)} after
        {runs["0"][0].validations()[0]["step"]:,} steps and {numbers(last["0"], 1)} at the end
        ({len(last["0"])} seeds); with N = 1 {numbers(first["1"], 0)} and {numbers(last["1"], 1)}
        ({len(last["1"])} seeds). Of the paper's two series of ten seeds with N = 0 one ends at 148.7 ± 299.7."""
    return prose(text)


def main(source: Source) -> str:
    made = need(source.made("main"))
    ends, ten, twenty = (
        {"EMA-VQ" if row.cell.method == "ema" else f"`{row.cell.neighborhood}`": made.mean(name, *kind(row))
         for row in made.rows}
        for name in ("loss", "steps10", "steps20")
    )  # fmt: skip
    soonest = min(twenty, key=lambda name: twenty[name])
    later = [
        ours.mean - told.mean
        for row in made.rows
        for name in ("steps10", "steps20")
        if (ours := row.ours()[name]) and (told := row.paper()[name])
    ]
    apart = [max(of.values()) - min(of.values()) for of in (ends, ten)]
    text = f"""Between the methods, the mean losses are up to {apart[0]:.2f} (1e-3) apart and the steps to 10% up to
        {apart[1]:.1f} thousand; the first at 20% is {soonest} with
        {twenty[soonest]:.1f} thousand, EMA-VQ has {twenty["EMA-VQ"]:.1f}. Beside the paper's, our steps differ by
        {min(later):+.1f} to {max(later):+.1f} thousand; a validation is every thousand."""
    return shown(made) + "\n" + prose(text)


def perplexity(source: Source) -> str:
    """At the first validation and at the last."""
    made = need(source.made("main"))
    names = {"hard": "the hard neighborhood", "exponential": "the exponential one", "gaussian": "the Gaussian"}
    names["none"] = "EMA-VQ"
    said = []
    for name, words in names.items():
        (row,) = [row for row in made.rows if row.cell.neighborhood == name]
        first, last = (statistics.fmean(run.validations()[i]["perplexity"] for run in row.runs) for i in (0, -1))
        said.append(f"{first:.0f} and {last:.0f} with {words}")
    at = made.rows[0].runs[0].validations()
    text = f"""The perplexity after {at[0]["step"]:,} and after {at[-1]["step"]:,} steps is {listed(said)} (means of
        {made.seeds} seeds)."""
    return prose(text)


def robustness(source: Source) -> str:
    made = need(source.made("robustness"))
    losses = {
        method: [made.loss(method, f"N={row.cell.count_init}", f"empty={row.cell.update_empty}")
                 for row in made.rows if row.cell.method == method]
        for method in ("ksom", "ema")
    }  # fmt: skip
    text = f"""Over all configurations KSOM's mean loss is {numbers(losses["ksom"], 1)}, EMA-VQ's
        {numbers(losses["ema"], 1)}."""
    return shown(made) + "\n" + prose(text)


def ablation(source: Source) -> str:
    made = source.made("ablation")
    if made is None:
        return ""
    losses = [spread.mean for row in made.rows if (spread := row.ours()["loss"])]
    text = f"Over neighborhoods, maps and `tau` the mean loss is {numbers(losses, 1)}."
    return f"## ablation\n\n{shown(made)}\n{prose(text)}"


def gradient(source: Source) -> str:
    made = source.made("gradient")
    if made is None:
        return ""
    means = {row.cell.method: ours.mean for row in made.rows if (ours := row.ours()["loss"])}
    others = [loss for method, loss in means.items() if method.startswith("som-vae-")]
    if not {"gradient", "ema", "ksom"} <= set(means) or not others:
        return f"## gradient\n\n{shown(made)}"
    text = f"""Codes that are trained by gradients without neighbors end at {means["gradient"]:.1f}, EMA-VQ at
        {means["ema"]:.1f} and KSOM at {means["ksom"]:.1f}. The SOM-VAE, gradients with neighbors, ends at
        {numbers(others, 1)} with a neighbor term that is averaged over dimensions, whatever its target and weight. With
        the term summed over dimensions, as its authors have it, it """
    text += f"ends at {means['som-vae']:.1f}." if "som-vae" in means else "has not been measured yet."
    return f"## gradient\n\n{shown(made)}\n{prose(text)}"


def losses(source: Source) -> str:
    """Our losses beside the paper's, over all cells of the tables but the one that collapses."""
    found: dict[str, Row] = {}
    for row in (row for made in source.tables("cifar10") for row in made.rows if row.cell.paper):
        key = row.cell.config(0).run_id  # one cell of several tables counts once, with most seeds
        found[key] = max(found.get(key, row), row, key=lambda row: row.n)
    lower: dict[str, tuple[float, float]] = {}
    for row in found.values():
        ours, paper = row.ours()["loss"], row.paper()["loss"]
        collapses = row.cell.method == "ema" and (row.cell.count_init, row.cell.update_empty) == ("0", "no")
        if ours and paper and not collapses:
            lower[row.cell.name] = paper.mean - ours.mean, 100 * (1 - ours.mean / paper.mean)
    above = [name for name, (by, _) in lower.items() if by <= 0]
    below = [by for by in lower.values() if by[0] > 0]
    text = f"""Of {len(lower)} cells (all that the paper has a loss of, but for that of EMA-VQ's collapse) our mean loss
        is below the paper's in {len(below)}, by {numbers([by for by, _ in below], 1)} (1e-3), or
        {numbers([by for _, by in below], 1)}%."""
    text += f" It is not in: {listed(above)}." if above else ""
    sheet = need(source.made("main")).sheet
    apart = [
        float(row[sheet.header.index("loss diff/SE")]) for row in sheet.rows if row[sheet.header.index("loss diff/SE")]
    ]
    text += f" In `main` the difference is {numbers(apart, 1, '+')} standard errors."
    return prose(text)


VARIANTS: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    "residual blocks of the authors' code (`residual=activated`)": lambda config: replace(
        config, model_options=config.model_options | {"residual": "activated"}
    ),
    "float32 (`--precision fp32`)": lambda config: replace(config, precision="fp32"),
}


def variants(source: Source) -> str:
    """KSOM `hard` with what the authors' code does otherwise, one thing at a time; nothing where none was run."""
    row = next(row for row in need(source.made("main")).rows if row.cell.neighborhood == "hard")
    shown = []
    for name, changed in VARIANTS.items():
        found = [source.library.finished(changed(row.cell.config(seed))) for seed in range(row.n)]
        losses = [best_loss(run) for run in found if run]
        same = [best_loss(row.runs[seed]) for seed, run in enumerate(found) if run]
        if losses:
            shown.append([name, *(listed(f"{loss:.2f}" for loss in part) for part in (losses, same))])
    ours, paper = row.ours()["loss"], row.paper()["loss"]
    if not shown or ours is None or paper is None:
        return ""
    note = f"""All seeds of `hard` as it is: {ours.mean:.2f} ± {ours.std:.2f}; the paper: {paper.mean:.1f} ±
        {paper.std:.1f}."""
    return table(["KSOM `hard`, best loss (1e-3)", "changed", "as it is, same seeds"], shown) + "\n" + prose(note)


def map_order(source: Source) -> str:
    return order(source, "cifar10")


def shift_psnr(source: Source) -> str:
    return moved(source, "cifar10")


def order(source: Source, dataset: str) -> str:
    """Topographic error and neighbors' distance, from the measured file; nothing where there is none."""
    rows = source.measured("topography", dataset)
    if not rows:
        return ""
    head = ["", "map", "two closest codes no neighbors", "by chance", "distance of neighbors over that of any two"]
    shown = [
        [row["method"], row["level"], f"{100 * float(row['topographic_error']):.1f}%",
         f"{100 * float(row['chance_error']):.1f}%", f"{float(row['neighbor_ratio']):.2f}"]
        for row in rows
    ]  # fmt: skip
    vectors = listed(f"{int(number):,}" for number in dict.fromkeys(row["vectors"] for row in rows))
    text = f"""{seeds_of(rows)}, {vectors} vectors of validation images; a distance of 1 is no order.
        ([CSV](results/topography-{dataset}.csv))"""
    return table(head, shown) + "\n" + prose(text)


def moved(source: Source, dataset: str) -> str:
    """PSNR over the offset, from the measured file; nothing where there is none."""
    rows = source.measured("shift-psnr", dataset)
    if not rows:
        return ""
    values: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        of = values.setdefault((row["moved"], row["method"]), {})
        of.setdefault(int(row["offset"]), []).append(float(row["to_reconstruction"]))
    choices = list(dict.fromkeys(choice for choice, _ in values))
    shown = [
        [
            (f"{choice}, " if len(choices) > 1 else "") + method,
            *(f"{statistics.fmean(of[offset]):.1f}" for offset in OFFSETS),
        ]
        for (choice, method), of in sorted(values.items(), key=lambda item: choices.index(item[0][0]))
    ]
    text = f"""PSNR in dB against the unmoved reconstruction. {seeds_of(rows)},
        {listed(f"{int(number):,}" for number in dict.fromkeys(row["images"] for row in rows))} validation images
        ([CSV](results/shift-psnr-{dataset}.csv))."""
    return table(["places moved", *(f"{offset:+d}" for offset in OFFSETS)], shown) + "\n" + prose(text)


def celebahq_afhq(source: Source) -> str:
    return at_256(source, "celebahq_afhq")


def imagenet(source: Source) -> str:
    return at_256(source, "imagenet")


def at_256(source: Source, dataset: str) -> str:
    """All of a data set at 256x256; nothing where it was not run."""
    made, found = source.tables(dataset), source.runs(dataset)
    if not made:
        return ""
    config = found[0].config
    images, held_out = config["source_train_images"], config["source_validation_images"]
    passes = config["steps"] * config["batch_size"] / images
    seeds = numbers([row.n for one in made for row in one.rows], 0)
    text = f"""A VQ-VAE-2 with two levels of {config["codebook_size"]} codes, {config["steps"]:,} steps with batches of
        {config["batch_size"]} ({passes:,.0f} passes over {images:,} training images; {held_out:,} validate),
        {seeds} seed{"s" * (seeds != "1")} a cell, {values(found, "precision")}, on one {values(found, "hardware")}."""
    if other_data(dataset, images):
        text += f""" The paper trains on about {IMAGES[dataset]:,} images: its numbers are of other data, and not to be
            compared with these. What is compared is the methods with each other."""
    parts = [
        f"## {TITLES[dataset]}\n",
        prose(text),
        *(f"### {one.table}, {NAMES[dataset]}\n\n{shown(one)}" for one in made),
    ]
    parts.append(use(made))
    for name, words in PICTURES.items():
        measures = {"topography": order, "shift-psnr": moved}
        if path := source.picture(name, dataset):
            options = f"--dataset {dataset} --steps {config['steps']} --batch-size {config['batch_size']}"
            parts.append(f"![{words}]({path.name})\n\n`topovq reproduce {name} {options}`\n")
        if name in measures and (rows := measures[name](source, dataset)):
            parts.append(rows)
    return "\n".join(parts)


def use(made: Sequence[Made]) -> str:
    """The use of both codebooks at the end, of every cell."""
    rows: dict[str, Row] = {row.cell.config(0).run_id: row for one in made for row in one.rows}
    shown = []
    for row in rows.values():
        last = [run.validations()[-1] for run in row.runs]
        cell = [row.cell.method, row.cell.neighborhood, row.cell.count_init, row.cell.update_empty, str(row.n)]
        shares = [f"{100 * mean(last, f'usage_{level}'):.1f}%" for level in (0, 1)]
        shown.append([*cell, *shares, *(f"{mean(last, f'perplexity_{level}'):.0f}" for level in (0, 1))])
    head = ["method", "neighborhood", "count_init", "update_empty", "n", "top codes used", "bottom codes used"]
    return "At the last step:\n\n" + table([*head, "top perplexity", "bottom perplexity"], shown)


# How things are written


BLOCKS: dict[str, Callable[[Source], str]] = {
    block.__name__: block
    for block in (runs, summary, sensitivity, initialization, main, perplexity, robustness, ablation, gradient, losses,
                  variants, map_order, shift_psnr, celebahq_afhq, imagenet)
}  # fmt: skip


def filled(page: str, source: Source) -> str:
    """The page with every block made anew."""
    there = [found[1] for found in BLOCK.finditer(page)]
    if sorted(there) != sorted(BLOCKS):
        raise ValueError(f"the page has the blocks {there}; it should have each of {list(BLOCKS)} once")

    def made(name: str) -> str:
        text = BLOCKS[name](source)
        return f"<!-- begin {name} -->\n{f'{chr(10)}{text}{chr(10)}' if text else ''}<!-- end {name} -->"

    return BLOCK.sub(lambda found: made(found[1]), page)
