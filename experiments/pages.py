"""What the pages in docs/ show of the experiments, from records: docs/results/*.csv and the pictures.

python -m experiments.pages                         the CSV files and the curves
python -m experiments.pages --figures reproduced    also pictures and measures of models, from a folder into which
                                                    `python -m experiments FIGURE --out reproduced` wrote them
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from experiments import schedules
from experiments.figures import FROM_RECORDS, draw, figures_of
from experiments.records import Records, facts
from experiments.scale import make_scale
from experiments.schedules import RECORDS, Line
from experiments.specs import Cell, Dataset, Options, cells
from experiments.tables import Table, as_csv, make_table
from topovq.storage import write_atomic
from topovq.tokenizer.training import TrainConfig

DOCS = Path(__file__).parents[1] / "docs"
LENGTHS: dict[Dataset, dict[str, Any]] = {  # of the runs there are; CIFAR-10 has the paper's
    "cifar10": {},
    "celebahq_afhq": {"steps": 10_000, "batch_size": 32},
    "imagenet": {"steps": 10_000, "batch_size": 32},
}
SEEDS: dict[Dataset, dict[str, int]] = {  # of the tables there are
    "cifar10": {"sensitivity": 5, "main": 5, "robustness": 5, "ablation": 3, "gradient": 3},
    "celebahq_afhq": {"main": 1, "robustness": 1},
    "imagenet": {"main": 1, "robustness": 1},
}
SIZES = (512, 1_024, 4_096, 16_384, 65_536, 262_144)
BLOCKS: dict[str, Callable[[TrainConfig], TrainConfig]] = {  # what the authors' code does otherwise, one at a time
    "residual blocks of the authors' code": lambda config: replace(
        config, model_options=config.model_options | {"residual": "activated"}
    ),
    "float32": lambda config: replace(config, precision="fp32"),
}
TOKENIZER = {  # of the methods of records/ride that anybody can use today
    "vqp": "vector-quantize-pytorch, k-means start and expiry",
    "peer": "vector-quantize-pytorch, k-means start and expiry",
    "ksom": "recommended",
    "ksom thr .1": "recommended, threshold_ema_dead_code=0.1",
    "ema": "EMA-VQ",
}
LARGEST = 300_000  # bytes of a picture as PNG
WIDEST = 2_000  # pixels of a picture that is not kept exactly
PLOTS = ("initialization", "perplexity", "neighborhoods", "shift-psnr", "topography")  # few colors: a palette will do


def tables(records: Records) -> Iterator[Table]:
    """The paper's tables and the study `scale`; cells that were not run are left empty."""
    for dataset, names in SEEDS.items():
        for name, seeds in names.items():
            yield make_table(name, Options(dataset, seeds, partial=True, **LENGTHS[dataset]), records)
    yield make_scale(Options("cifar10", seeds=3, partial=True, codebooks=SIZES), records)
    yield make_scale(Options("celebahq_afhq", seeds=1, **LENGTHS["celebahq_afhq"]), records)


def levels(records: Records) -> list[Line]:
    """At 256x256, the codes in use on each level at the last step."""
    lines: list[Line] = []
    datasets: tuple[Dataset, ...] = ("celebahq_afhq", "imagenet")
    for dataset in datasets:
        for cell in dict.fromkeys((*cells("main", dataset), *cells("robustness", dataset))):
            run = records.finished(cell.config(0, **LENGTHS[dataset]))
            if run is None or any(same(line, cell, dataset) for line in lines):
                continue
            last = run.validations()[-1]
            for level, name in enumerate(("top", "bottom")):
                lines.append({
                    "dataset": dataset, "method": cell.method, "neighborhood": cell.neighborhood,
                    "count_init": cell.count_init, "update_empty": cell.update_empty, "n": 1,
                    "best_loss": round(1e3 * run.best, 3), "level": name,
                    "used_percent": round(100 * last[f"usage_{level}"], 3),
                    "perplexity": round(last[f"perplexity_{level}"], 1), **facts([run]),
                })  # fmt: skip
    return lines


def same(line: Line, cell: Cell, dataset: str) -> bool:
    names = ("method", "neighborhood", "count_init", "update_empty")
    return line["dataset"] == dataset and all(line[name] == getattr(cell, name) for name in names)


def blocks(records: Records) -> list[Line]:
    """KSOM `hard` with what the authors' code does otherwise, beside the same seeds as they are."""
    cell = next(cell for cell in cells("main", "cifar10") if cell.neighborhood == "hard")
    lines = []
    for name, changed in BLOCKS.items():
        for seed in range(SEEDS["cifar10"]["main"]):
            run, usual = records.finished(changed(cell.config(seed))), records.finished(cell.config(seed))
            if run is not None and usual is not None:
                losses = {"loss": round(1e3 * run.best, 3), "loss_as_it_is": round(1e3 * usual.best, 3)}
                lines.append({"change": name, "seed": seed, **losses, **facts([run])})
    return lines


def tokenizer(records: Path) -> list[Line]:
    """A modern tokenizer at the end of its training (records/ride), with what can be used today."""
    told_of = json.loads((records / "ride" / "results.json").read_text())
    said = {"n": told_of["seeds"], "hardware": "NVIDIA H200", "commit": told_of["commit"].split()[0]}
    assert said["hardware"] in told_of["hardware"]
    lines = []
    for run in told_of["runs"]:
        cell, last = run["cell"], run["rows"][-1]
        method = TOKENIZER.get(run["name"], TOKENIZER.get(cell["method"]))
        if method is None or run["plan"] == 2:  # a model in between
            continue
        place = {
            "stride": 16 if run["plan"] == 1 else 8,
            "codebook_size": cell.get("K", 16_384),
            "dim": cell.get("d", 8),
        }
        percent = {"used_percent": round(100 * last["used"], 2)}
        measured = {
            "psnr": last["psnr"],
            **percent,
            "perplexity": last["perplexity"],
            "topographic_error": last["topo"],
        }
        lines.append({**place, "steps": last["step"], "method": method, **measured, **said})
    return sorted(lines, key=lambda line: [str(line[name]) for name in ("codebook_size", "dim", "stride", "steps")])


def write_tables(records: Path = RECORDS, docs: Path = DOCS) -> list[Path]:
    every = Records([records])
    texts = {table.name: as_csv(table) for table in tables(every)}
    texts |= {"levels": _csv(levels(every)), "blocks": _csv(blocks(every)), "tokenizer": _csv(tokenizer(records))}
    texts |= {"schedules": _csv(schedules.schedules(records)), "decay": _csv(schedules.decays(records))}
    texts |= {"smoothing": _csv(schedules.smoothing(records)), "update-empty": _csv(schedules.update_empty(records))}
    for name, text in texts.items():
        write_atomic(docs / "results" / f"{name}.csv", text.encode())
    return [docs / "results" / f"{name}.csv" for name in texts]


def _csv(lines: list[Line]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def draw_curves(records: Path = RECORDS, docs: Path = DOCS) -> list[Path]:
    """The figures that need no models, of every data set that was run."""
    written = []
    for dataset, length in LENGTHS.items():
        for name in [*FROM_RECORDS, *(["neighborhoods"] if dataset == "cifar10" else [])]:
            with tempfile.TemporaryDirectory() as folder:
                options = Options(dataset, partial=True, runs=records, records=(), out=Path(folder), **length)
                written.append(put(draw(name, options)[0], docs, name, dataset))
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
