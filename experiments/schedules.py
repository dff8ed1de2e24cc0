"""What was tried before a setting was recommended: schedules, decays, and ways to smooth counts. Rows for CSV files.

    python -m experiments.schedules            trains what is missing of 60 short runs, for a GPU

Those are of the paper's CIFAR-10 model, 6,000 steps, one seed. The Gaussian's width falls exponentially from a share of
the map's side to its last width over a share of the steps; EMA-VQ and two of the paper's neighborhoods are beside it.
The runs behind the other tables are in records/ alone (records/README.md says what they are).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.records import Record, Records, Spread, facts
from experiments.runs import missing, run_all
from experiments.specs import Options, configs
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
OTHER: list[dict[str, Any]] = [  # of the first
    {"decay": 0.97},
    {"decay": 0.95},
    {"count_init": 0.0},
    {"decay": 0.97, "count_init": 0.0},
    {"eps": 1e-12},
    {"update_empty": False},
]
RECORDS = Path(__file__).parents[1] / "records"

Line = dict[str, Any]  # of a CSV file


def tried() -> Iterator[tuple[str, str, list[TrainConfig]]]:
    """What a row of the table is, what it says, and its runs, one a size."""
    base = replace(configs("main", Options(seeds=1))[0], steps=STEPS)

    def run(size: int, quantizer: str, **options: object) -> TrainConfig:
        return replace(base, codebook_size=size, quantizer=quantizer, quantizer_options=options)

    def gaussian(share: float, span: float, end: float, **options: object) -> list[TrainConfig]:
        starts = [max(LEAST_START, share * size**0.5) for size in SIZES]
        falls = [Schedule.exponential(start, end, round(span * STEPS)).to_dict() for start in starts]
        falling = [{"neighborhood": "gaussian", "schedule": fall, **options} for fall in falls]
        return [run(size, "kohonen", **fall) for size, fall in zip(SIZES, falling)]

    for share, span, end in TRIED:
        yield "schedule", f"side / {round(1 / share)} to {end} over {span:g} of the steps", gaussian(share, span, end)
    for options in OTHER:
        said = ", ".join(f"{name} {value}" for name, value in options.items())
        yield "change", f"the first with {said}", gaussian(*TRIED[0], **options)
    for name in ("hard", "exponential"):
        yield "other", f"{name}, the paper's", [run(size, "kohonen", neighborhood=name) for size in SIZES]
    yield "other", "EMA-VQ", [run(size, "ema") for size in SIZES]


def schedules(records: Path = RECORDS) -> list[Line]:
    """Of each row and size that was run: validation loss (1e-3) and codes in use at the last step."""
    every = Records([records])
    lines = []
    for group, label, runs in tried():
        for config in runs:
            found = every.finished(config)
            if found is not None:
                lines.append({"group": group, "neighborhood": label, **_end(found)})
    return lines


def decays(records: Path = RECORDS) -> list[Line]:
    """Decays in short trainings: of a small model on CIFAR-10, and of the quick version of the study `scale`."""
    lines = []
    for model, folder in (("small", "schedule_small"), ("quick", "schedule_short")):
        for run in Records([records / folder]):
            options = run.config["quantizer_options"]
            name = "EMA-VQ" if run.config["quantizer"] == "ema" else "recommended"
            falls = options.get("schedule")
            if model == "small" and falls:
                side = run.config["codebook_size"] ** 0.5
                name = f"side / {side / falls['start']:g} over {falls['steps'] / run.config['steps']:g} of the steps"
            settings = {"decay": options.get("decay", 0.99), "count_init": options.get("count_init", 1)}
            lines.append({"model": model, "neighborhood": name, **settings, **_end(run)})
    order = ("model", "neighborhood", "steps", "decay", "count_init", "codebook_size")
    return sorted(lines, key=lambda line: [line[name] for name in order])


def smoothing(records: Path = RECORDS) -> list[Line]:
    """Ways to smooth the counts, with 16 codes for each token of a batch."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for run in Records([records / "smoothing"]):
        options = run.config["quantizer_options"]
        name = "recommended" if "schedule" in options else "recommended, without steps"
        name = "EMA-VQ" if run.config["quantizer"] == "ema" else name
        said = f"eps = {options.get('eps', 1e-5):.0e}".replace("e-0", "e-")
        said += ", of a copy" if options.get("count_smoothing") == "copy" else ""
        said = said if options.get("update_empty", True) else "none"
        said += f", decay = {options['decay']:g}" if "decay" in options else ""
        groups.setdefault((name, said), []).append(run)
    lines = []
    for name, said in sorted(groups, key=lambda key: (key[0] == "EMA-VQ", -len(groups[key]), key)):
        runs = groups[name, said]
        last = [run.validations()[-1] for run in runs]
        measured = {
            **_spread("loss", [1e3 * seen["loss"] for seen in last]),
            "used_percent": round(fmean(100 * seen["usage"] for seen in last), 3),
            "perplexity": round(fmean(seen["perplexity"] for seen in last), 1),
        }
        lines.append({"neighborhood": name, "smoothing": said, "n": len(runs), **measured, **facts(runs)})
    return lines


def update_empty(records: Path = RECORDS) -> list[Line]:
    """The study `scale` with smoothed counts beside the same without.

    The loss is the median over the last third of a training, since single ones jump. `used` are the codes that occur
    among the validation tokens, `lately` those chosen in about the last hundred batches of the training.
    """
    smoothed = {_but_for_the_rule(run): run for run in Records([records / "smoothed"])}
    others = {_but_for_the_rule(run): run for run in Records([records / "scale"])}
    groups: dict[tuple[str, int, int], list[tuple[Record, Record]]] = {}
    for key, run in smoothed.items():
        place = run.config["data"], run.config["codebook_size"], run.config["steps"]
        groups.setdefault(place, []).append((run, others[key]))
    lines = []
    for place, pairs in sorted(groups.items()):
        line: Line = {**dict(zip(("data", "codebook_size", "steps"), place)), "n": len(pairs)}
        for way, runs in zip(("smoothed", "kept"), zip(*pairs)):
            line |= _spread(f"{way}_loss", [1e3 * median(late_losses(run)) for run in runs])
            for what, name in (("used", "usage"), ("lately", "train_usage")):
                share = fmean(run.validations()[-1][name] for run in runs)
                line[f"{way}_{what}_percent"] = round(100 * share, 3)
        lines.append({**line, **facts([run for pair in pairs for run in pair])})
    return lines


def late_losses(run: Record) -> list[float]:
    """Of the validations in the last third of a training."""
    return [seen["loss"] for seen in run.validations() if 3 * seen["step"] > 2 * run.config["steps"]]


def _end(run: Record) -> Line:
    last = run.validations()[-1]
    measured = {"loss": round(1e3 * last["loss"], 3), "used_percent": round(100 * last["usage"], 3)}
    return {**{name: run.config[name] for name in ("codebook_size", "steps")}, "n": 1, **measured, **facts([run])}


def _spread(name: str, values: list[float]) -> Line:
    spread = Spread.of(values)
    assert spread is not None
    return {f"{name}_mean": round(spread.mean, 3), f"{name}_std": "" if spread.std is None else round(spread.std, 3)}


def _but_for_the_rule(run: Record) -> tuple[object, ...]:
    options = run.config["quantizer_options"]
    names = ("data", "quantizer", "codebook_size", "steps", "seed")
    return (*(run.config[name] for name in names), options.get("neighborhood"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "schedules", help="folder of the runs")
    arguments = parser.parse_args()
    run_all(missing([config for *_, runs in tried() for config in runs], Records([RECORDS])), arguments.runs)


if __name__ == "__main__":
    main()
