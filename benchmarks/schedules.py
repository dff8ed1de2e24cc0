"""Schedules of the neighborhood over codebook sizes, from which the recommended one was chosen.

    python -m benchmarks.schedules                  the table, from records/schedule
    python -m benchmarks.schedules --run            runs what is missing of 60 short runs first, for a GPU

The CIFAR-10 model of the paper, 6,000 steps, one seed. The Gaussian's width falls exponentially from a share of the
map's side to its last width over a share of the steps; EMA-VQ and two of the paper's neighborhoods are beside it. Rows
of which nothing was run are left out, and a dash stands for a single run that was not. A second table is of a small
model with 4,096 codes, a third of decays in the quick version of the study `scale`, and a fourth of the smoothing of
counts where there are 16 codes for each token of a batch, all trained on a CPU. The last is of the study `scale` with
and without that smoothing, on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, stdev

from experiments.library import Found, Library
from experiments.specs import configs
from experiments.sweep import run_all
from topovq.neighborhood import LEAST_START, Schedule
from topovq.tokenizer.training import TrainConfig

STEPS = 6_000
SIZES = (512, 4_096, 16_384, 65_536)
TRIED = [  # share of the side, share of the steps, last width
    (1 / 16, 0.5, 0.3),
    (1 / 8, 0.5, 0.3),
    (1 / 32, 0.5, 0.3),
    (1 / 16, 0.3, 0.3),
    (1 / 16, 0.8, 0.3),
    (1 / 16, 0.5, 0.5),
]
OTHER = [  # of the first
    {"decay": 0.97},
    {"decay": 0.95},
    {"count_init": 0.0},
    {"decay": 0.97, "count_init": 0.0},
    {"eps": 1e-12},
    {"update_empty": False},
]
RECORDS = Path(__file__).parents[1] / "records"


def rows() -> Iterator[tuple[str, list[TrainConfig]]]:
    """What a row of the table says, and its runs, one a size."""
    base = replace(configs("main", seeds=1)[0], steps=STEPS)

    def run(size: int, quantizer: str, **options: object) -> TrainConfig:
        return replace(base, codebook_size=size, quantizer=quantizer, quantizer_options=options)

    def gaussian(share: float, span: float, end: float, **options: object) -> list[TrainConfig]:
        starts = [max(LEAST_START, share * size**0.5) for size in SIZES]
        falls = [Schedule.exponential(start, end, round(span * STEPS)).to_dict() for start in starts]
        falling = [{"neighborhood": "gaussian", "schedule": fall, **options} for fall in falls]
        return [run(size, "kohonen", **fall) for size, fall in zip(SIZES, falling)]

    for share, span, end in TRIED:
        yield f"side / {round(1 / share)} to {end} over {span:g} of the steps", gaussian(share, span, end)
    for options in OTHER:
        said = ", ".join(f"{name} {value}" for name, value in options.items())
        yield f"the first of these with {said}", gaussian(*TRIED[0], **options)
    for name in ("hard", "exponential"):
        yield f"`{name}`, the paper's", [run(size, "kohonen", neighborhood=name) for size in SIZES]
    yield "EMA-VQ", [run(size, "ema") for size in SIZES]


def table(records: Path = RECORDS) -> list[str]:
    """The rows in Markdown: validation loss (1e-3) and codes in use at the last step."""
    library = Library([records])
    lines = [f"| neighborhood | {' | '.join(f'K = {size:,}' for size in SIZES)} |", "| --- |" + " --: |" * len(SIZES)]
    for label, runs in rows():
        found = [library.finished(config) for config in runs]
        last = [run.validations()[-1] if run else None for run in found]
        shown = [f"{1e3 * seen['loss']:.1f}, {seen['usage']:.1%}" if seen else "-" for seen in last]
        if any(found):
            lines.append(f"| {label} | {' | '.join(shown)} |")
    return lines


def small_table(records: Path = RECORDS / "schedule_small") -> list[str]:
    """The runs of a small model in Markdown: validation loss (1e-3) and codes in use at the last step, by length."""
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for run in Library([records]).all():
        options, last = run.config["quantizer_options"], run.validations()[-1]
        falls = options.get("schedule")
        share = f"over {falls['steps'] / run.config['steps']:g} of the steps" if falls else ""
        name = f"side / {run.config['codebook_size'] ** 0.5 / falls['start']:g} {share}" if falls else "EMA-VQ"
        key = name, f"{options.get('decay', 0.99):g}", f"{options.get('count_init', 1):g}"
        cells.setdefault(key, {})[run.config["steps"]] = f"{1e3 * last['loss']:.1f}, {last['usage']:.1%}"
    lengths = sorted({length for found in cells.values() for length in found})
    head = ["neighborhood", "decay", "count_init", *(f"{length:,} steps" for length in lengths)]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --: |" * (2 + len(lengths))]
    for key in sorted(cells, key=lambda k: (k[0] == "EMA-VQ", -len(cells[k]), k)):
        lines.append(f"| {' | '.join([*key, *(cells[key].get(length, '') for length in lengths)])} |")
    return lines


def short_table(records: Path = RECORDS / "schedule_short") -> list[str]:
    """Decays in short trainings, in Markdown: validation loss (1e-3) and codes in use at the last step."""
    cells: dict[tuple[str, float], dict[tuple[int, int], str]] = {}
    for run in Library([records]).all():
        config, last = run.config, run.validations()[-1]
        name = "EMA-VQ" if config["quantizer"] == "ema" else "recommended"
        cell = cells.setdefault((name, config["quantizer_options"]["decay"]), {})
        cell[config["steps"], config["codebook_size"]] = f"{1e3 * last['loss']:.1f}, {last['usage']:.1%}"
    columns = sorted({column for found in cells.values() for column in found})
    head = ["neighborhood", "decay", *(f"{steps:,} steps, K = {size:,}" for steps, size in columns)]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --: |" * (1 + len(columns))]
    for name, decay in sorted(cells, key=lambda key: (key[0] == "EMA-VQ", -key[1])):
        shown = [cells[name, decay].get(column, "") for column in columns]
        lines.append(f"| {' | '.join([name, f'{decay:g}', *shown])} |")
    return lines


def smoothing_table(records: Path = RECORDS / "smoothing") -> list[str]:
    """Ways to smooth the counts, in Markdown: validation loss (1e-3) and codes in use at the last step, over seeds."""
    cells: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for run in Library([records]).all():
        options, last = run.config["quantizer_options"], run.validations()[-1]
        name = "recommended" if "schedule" in options else "recommended, without `steps`"
        name = "EMA-VQ" if run.config["quantizer"] == "ema" else name
        said = f"eps = {options.get('eps', 1e-5):.0e}".replace("e-0", "e-")
        said += ", a copy of the counts is smoothed" if options.get("count_smoothing") == "copy" else ""
        said = said if options.get("update_empty", True) else "none: codes that receive nothing stay as they are"
        said += f", decay = {options['decay']:g}" if "decay" in options else ""
        cells.setdefault((name, said), []).append((1e3 * last["loss"], last["usage"], last["perplexity"]))
    lines = [
        "| neighborhood | smoothing | n | loss | codes used | perplexity |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for name, said in sorted(cells, key=lambda key: (key[0] == "EMA-VQ", -len(cells[key]), key)):
        losses, used, perplexities = zip(*cells[name, said])
        spread = f" ± {stdev(losses):.1f}" if len(losses) > 1 else ""
        shown = f"{mean(losses):.1f}{spread} | {mean(used):.1%} | {mean(perplexities):,.0f}"
        lines.append(f"| {name} | {said} | {len(losses)} | {shown} |")
    return lines


def empty_table(records: Path = RECORDS) -> list[str]:
    """Runs of the study `scale` with smoothed counts beside those without, in Markdown: validation loss (1e-3), the
    median of those in the last third of the training, since single ones jump; and of the last step the codes that occur
    among the validation tokens, and those chosen lately, in about the last hundred batches of the training."""
    smoothed = {_but_for_the_rule(run): run for run in Library([records / "smoothed"]).all()}
    others = {_but_for_the_rule(run): run for run in Library([records / "scale"]).all()}
    cells: dict[tuple[str, int, int], list[tuple[Found, Found]]] = {}
    for key, run in smoothed.items():
        place = run.config["data"], run.config["codebook_size"], run.config["steps"]
        cells.setdefault(place, []).append((run, others[key]))
    head = ["data", "K", "steps", "n"]
    head += [f"{what}, {way}" for what in ("loss", "used", "lately") for way in ("smoothed", "not")]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --: |" * (len(head) - 1)]
    for (data, size, steps), pairs in sorted(cells.items()):
        ways = list(zip(*pairs))
        losses = [[1e3 * median(late_losses(run)) for run in way] for way in ways]
        shown = [f"{mean(way):.1f}" + (f" ± {stdev(way):.1f}" if len(way) > 1 else "") for way in losses]
        for name in ("usage", "train_usage"):
            shown += [f"{mean(run.validations()[-1][name] for run in way):.1%}" for way in ways]
        lines.append(f"| {data} | {size:,} | {steps:,} | {len(pairs)} | {' | '.join(shown)} |")
    return lines


def late_losses(run: Found) -> list[float]:
    """Of the validations in the last third of a training."""
    return [seen["loss"] for seen in run.validations() if 3 * seen["step"] > 2 * run.config["steps"]]


def _but_for_the_rule(run: Found) -> tuple[object, ...]:
    options = run.config["quantizer_options"]
    names = ("data", "quantizer", "codebook_size", "steps", "seed")
    return (*(run.config[name] for name in names), options.get("neighborhood"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="train what is missing, into --runs")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "schedules")
    arguments = parser.parse_args()
    if arguments.run:
        library = Library([RECORDS])
        todo = [config for _, runs in rows() for config in runs if library.finished(config) is None]
        run_all(todo, arguments.runs)
    tables = (table(), small_table(), short_table(), smoothing_table(), empty_table())
    print("\n\n".join("\n".join(lines) for lines in tables))


if __name__ == "__main__":
    main()
