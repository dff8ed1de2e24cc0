"""What was tried before a setting was recommended: CSV files of short runs, one seed each where none is named.

The schedules are of the paper's CIFAR-10 model: the Gaussian's width falls exponentially from a share of the map's side
to its last width over a share of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.records import Record, Records
from experiments.specs import Options, configs
from experiments.tables import Line, facts, mean_and_std_of
from topovq.neighborhood import LEAST_START, Schedule
from topovq.tokenizer.training import TrainConfig

STEPS = 6_000
TRIED_AT = (512, 4_096, 16_384, 65_536)  # codes
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


def tried() -> Iterator[tuple[str, str, list[TrainConfig]]]:
    """What a row of the table is, what it says, and its runs, one a size."""
    base = replace(configs("main", Options(blocks="plain", seeds=1))[0], steps=STEPS)

    def run(size: int, quantizer: str, **options: object) -> TrainConfig:
        return replace(base, codebook_size=size, quantizer=quantizer, quantizer_options=options)

    def gaussian(share: float, span: float, end: float, **options: object) -> list[TrainConfig]:
        starts = [max(LEAST_START, share * size**0.5) for size in TRIED_AT]
        falls = [Schedule.exponential(start, end, round(span * STEPS)).to_dict() for start in starts]
        falling = [{"neighborhood": "gaussian", "schedule": fall, **options} for fall in falls]
        return [run(size, "kohonen", **fall) for size, fall in zip(TRIED_AT, falling)]

    for share, span, end in TRIED:
        yield "schedule", f"side / {round(1 / share)} to {end} over {span:g} of the steps", gaussian(share, span, end)
    for options in OTHER:
        said = ", ".join(f"{name} {value}" for name, value in options.items())
        yield "change", f"the first with {said}", gaussian(*TRIED[0], **options)
    for name in ("hard", "exponential"):
        yield "other", f"{name}, the paper's", [run(size, "kohonen", neighborhood=name) for size in TRIED_AT]
    yield "other", "EMA-VQ", [run(size, "ema") for size in TRIED_AT]


def schedules(records: Records) -> list[Line]:
    """Of each row and size that was run: validation loss (1e-3) and codes in use at the last step."""
    lines = []
    for group, label, runs in tried():
        for config in runs:
            found = records.finished(config)
            if found is not None:
                lines.append({"group": group, "neighborhood": label, **_end(found)})
    return lines


def decays(folder: Path) -> list[Line]:
    """Decays in short trainings: of a small model on CIFAR-10, and of the quick version of the study `scale`."""
    lines = []
    for model, name in (("small", "schedule_small"), ("quick", "schedule_short")):
        for run in Records([folder / name]):
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


def smoothing(folder: Path) -> list[Line]:
    """Ways to smooth the counts, with 16 codes for each token of a batch."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for run in Records([folder / "smoothing"]):
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
            **mean_and_std_of("loss", [1e3 * seen["loss"] for seen in last], 3),
            "used_percent": round(fmean(100 * seen["usage"] for seen in last), 3),
            "perplexity": round(fmean(seen["perplexity"] for seen in last), 1),
        }
        lines.append({"neighborhood": name, "smoothing": said, "n": len(runs), **measured, **facts(runs)})
    return lines


def update_empty(folder: Path) -> list[Line]:
    """The study `scale` with smoothed counts beside the same without.

    The loss is the median over the last third of a training, since single ones jump. `used` are the codes that occur
    among the validation tokens, `lately` those chosen in about the last hundred batches of the training.
    """
    smoothed = {_but_for_the_rule(run): run for run in Records([folder / "smoothed"])}
    others = {_but_for_the_rule(run): run for run in Records([folder / "scale"])}
    groups: dict[tuple[str, int, int], list[tuple[Record, Record]]] = {}
    for key, run in smoothed.items():
        place = run.config["data"], run.config["codebook_size"], run.config["steps"]
        groups.setdefault(place, []).append((run, others[key]))
    lines = []
    for place, pairs in sorted(groups.items()):
        line: Line = {**dict(zip(("data", "codebook_size", "steps"), place)), "n": len(pairs)}
        for way, runs in zip(("smoothed", "kept"), zip(*pairs)):
            line |= mean_and_std_of(f"{way}_loss", [1e3 * median(late_losses(run)) for run in runs], 3)
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


def _but_for_the_rule(run: Record) -> tuple[object, ...]:
    options = run.config["quantizer_options"]
    names = ("data", "quantizer", "codebook_size", "steps", "seed")
    return (*(run.config[name] for name in names), options.get("neighborhood"))


def csv_files(folder: Path, records: Records) -> dict[str, list[Line]]:
    """The rows of every file, by its name."""
    files = {"schedules": schedules(records), "decay": decays(folder)}
    return files | {"smoothing": smoothing(folder), "update-empty": update_empty(folder)}
