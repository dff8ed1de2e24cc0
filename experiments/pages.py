"""What the pages in docs/ show of the experiments, from records: docs/results/*.csv and the pictures.

python -m experiments.pages                         the CSV files and the curves
python -m experiments.pages --figures reproduced    also pictures and measures of models, from a folder into which
                                                    `python -m experiments FIGURE --out reproduced` wrote them
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from PIL import Image

from experiments.clients.table import draw_clients, make_clients
from experiments.figures.draw import draw
from experiments.figures.parts import FROM_RECORDS, TRACED, figures_of
from experiments.figures.style import save
from experiments.paper.claim_list import csv_files
from experiments.paper.claims import LARGE, levels
from experiments.paper.groups import SHORT
from experiments.prior import table as prior
from experiments.runs import Record, Records, Spread, facts, most_seeds
from experiments.scale import make_scale
from experiments.specs import CLIENTS, PRIOR, SEEDS, TABLES, Dataset, Options, cells, configs
from experiments.tables import Table, as_csv, lines_as_csv, make_table
from topovq.neighborhood import LEAST_START, Schedule
from topovq.storage import write_atomic
from topovq.tokenizer.training import TrainConfig

DOCS, RECORDS = (Path(__file__).parents[1] / name for name in ("docs", "records"))
Line = dict[str, Any]  # of a CSV file
LENGTHS: dict[Dataset, dict[str, Any]] = {  # of the runs that pictures are of; CIFAR-10 has the paper's
    "cifar10": {},
    "faces": {"blocks": "plain", **SHORT},
    "imagenet": {"blocks": "plain", **SHORT},
}
SIZES = (512, 1_024, 4_096, 16_384, 65_536, 262_144)
BLOCKS: dict[str, Callable[[TrainConfig], TrainConfig]] = {  # what the authors' code does otherwise, one at a time
    "residual blocks of the authors' code": lambda config: replace(
        config, model_options=config.model_options | {"residual": "activated"}
    ),
    "float32": lambda config: replace(config, precision="fp32"),
}
LARGEST = 300_000  # bytes of a picture as PNG
WIDEST = 2_000  # pixels of a picture that is not kept exactly
STUDIES = {CLIENTS: (make_clients, draw_clients), PRIOR: (prior.make_prior_table, prior.draw_prior)}
PLOTS = (
    *STUDIES,
    "initialization",
    "perplexity",
    *TRACED,
    "neighborhoods",
    "shift-psnr",
    "topography",
)  # few colors: a palette will do


def tables(records: Records) -> Iterator[Table]:
    """The paper's tables and the study `scale`; cells that were not run are left empty.

    At 256x256 there are two of each: of our short runs, and of the paper's length and blocks once there is a run.
    """
    for name in TABLES:
        yield make_table(name, Options("cifar10", render_only=True), records)
    for dataset, name in product(LARGE, ("main", "robustness")):
        yield make_table(name, Options(dataset, seeds=1, partial=True, **LENGTHS[dataset]), records)
        whole = Options(dataset, blocks="paper", partial=True)
        if seeds := most_seeds(name, whole, records):
            table = make_table(name, replace(whole, seeds=seeds), records)
            yield replace(table, name=f"{table.name}-paper")
    yield make_scale(Options("cifar10", seeds=3, partial=True, codebooks=SIZES), records)
    yield make_scale(Options("faces", seeds=1, **LENGTHS["faces"]), records)


def studies(records: Path) -> dict[str, Table]:
    """The tables of the studies that have records in a folder of their own."""
    return {
        name: make(Options(runs=records / name, records=(), partial=True))
        for name, (make, _) in STUDIES.items()
        if (records / name).is_dir()
    }


def blocks(records: Records) -> list[Line]:
    """KSOM `hard` with what the authors' code does otherwise, beside the same seeds as they are."""
    cell = next(cell for cell in cells("main", "cifar10", blocks="plain") if cell.neighborhood == "hard")
    lines = []
    for name, changed in BLOCKS.items():
        for seed in range(SEEDS["plain"]):
            run, usual = records.finished(changed(cell.config(seed))), records.finished(cell.config(seed))
            if run is not None and usual is not None:
                found = {"loss": round(1e3 * run.best, 3), "loss_as_it_is": round(1e3 * usual.best, 3)}
                found |= {"steps20_k": run.steps_to(1.2) / 1e3, "steps20_k_as_it_is": usual.steps_to(1.2) / 1e3}
                lines.append({"change": name, "seed": seed, **found, **facts([run])})
    return lines


# What was tried before a setting was recommended. The schedules are of the paper's CIFAR-10 model, one seed: the
# Gaussian's width falls exponentially from a share of the map's side to its last width over a share of the steps.

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


def write_tables(records: Path = RECORDS, docs: Path = DOCS) -> list[Path]:
    every = Records([records])
    texts = {table.name: as_csv(table) for table in (*tables(every), *studies(records).values())}
    texts |= {"levels": lines_as_csv(levels(every)), "blocks": lines_as_csv(blocks(every))}
    texts |= {"schedules": lines_as_csv(schedules(records)), "decay": lines_as_csv(decays(records))}
    texts |= {"smoothing": lines_as_csv(smoothing(records)), "update-empty": lines_as_csv(update_empty(records))}
    texts |= {name: lines_as_csv(lines) for name, lines in csv_files(records, every).items()}
    for name, text in texts.items():
        write_atomic(docs / "results" / f"{name}.csv", text.encode())
    looked_at = prior.find_sampled([records / PRIOR])
    extras = prior.write_extras(records / PRIOR, docs / "results") if looked_at else []
    return [*(docs / "results" / f"{name}.csv" for name in texts), *extras]


def draw_curves(records: Path = RECORDS, docs: Path = DOCS) -> list[Path]:
    """The figures that need no models, of every data set that was run."""
    written = []
    for dataset, length in LENGTHS.items():
        for name in [*FROM_RECORDS, *([*TRACED, "neighborhoods"] if dataset == "cifar10" else [])]:
            with tempfile.TemporaryDirectory() as folder:
                asked: dict[str, Any] = {"partial": True, "render_only": True, "runs": records, "records": ()}
                options = Options(dataset, out=Path(folder), **asked, **length)
                try:
                    written.append(put(draw(name, options)[0], docs, name, dataset))
                except FileNotFoundError:
                    if name not in TRACED:  # which may not be run yet
                        raise
    for name, table in studies(records).items():
        if (figure := STUDIES[name][1](table)) is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            written.append(put(save(figure, Path(folder), name)[0], docs, name, "cifar10"))
    for name, picture in prior.pictures(records / PRIOR).items():
        written.append(put(picture, docs, name, "cifar10"))
    return written


def take_figures(folder: Path, docs: Path = DOCS) -> list[Path]:
    """Pictures and measures of models that `python -m experiments` wrote into a folder."""
    written = []
    for dataset in LENGTHS:
        for name in figures_of(dataset):
            picture, rows = (folder / f"{name}-{dataset}.{kind}" for kind in ("png", "csv"))
            if name in FROM_RECORDS or not picture.exists():
                continue
            written.append(put(picture, docs, name, dataset))
            if rows.exists():
                written.append(docs / "results" / rows.name)
                write_atomic(written[-1], rows.read_bytes())
    return written


def put(picture: Path, docs: Path, name: str, dataset: str) -> Path:
    """A picture beside the pages: PNG, of few colors with a palette; where that is large WebP, exact if that is not."""
    with Image.open(picture) as opened:
        image = opened.convert("RGB")
    few = image.quantize(256, dither=Image.Dither.NONE) if name in PLOTS else image
    suffix, data = "png", _encoded(few, "png", optimize=True)
    for exact in (True, False):
        if len(data) > LARGEST:
            if not exact and image.width > WIDEST:
                image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.Resampling.LANCZOS)
            suffix, data = "webp", _encoded(image, "webp", lossless=exact, quality=75, method=6)
    words = ["results", name.replace("-", "_"), *([] if dataset == "cifar10" else [dataset])]
    for kind in ("png", "webp"):
        (docs / f"{'_'.join(words)}.{kind}").unlink(missing_ok=True)
    path = docs / f"{'_'.join(words)}.{suffix}"
    write_atomic(path, data)
    return path


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, help="folder that `python -m experiments` wrote figures into")
    folder = parser.parse_args().figures
    if folder is not None and not folder.is_dir():
        parser.error(f"there is no folder {str(folder)!r}")
    written = [*write_tables(), *draw_curves(), *(take_figures(folder) if folder else [])]
    print(f"written: {', '.join(path.name for path in written)}")


if __name__ == "__main__":
    main()
