"""What the pages in docs/ show of the experiments, from records: docs/results/*.csv and the pictures.

python -m experiments.pages                         the CSV files and the curves
python -m experiments.pages --figures reproduced    also pictures and measures of models, from a folder into which
                                                    `python -m experiments FIGURE --out reproduced` wrote them
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from PIL import Image

from experiments.clients.table import draw_clients, make_clients
from experiments.figures.draw import draw
from experiments.figures.parts import FROM_RECORDS, MEASURED, TRACED, figures_of
from experiments.figures.style import save
from experiments.paper import claim_list
from experiments.paper.claims import LARGE
from experiments.paper.groups import SHORT
from experiments.paper.table import make_table, most_seeds
from experiments.prior import table as prior
from experiments.records import RECORDS, Records
from experiments.scale import tried
from experiments.scale.table import make_scale
from experiments.specs import CLIENTS, PRIOR, TABLES, Dataset, Options
from experiments.tables import Table, as_csv, lines_as_csv
from topovq.storage import write_atomic

DOCS = RECORDS.parent / "docs"
LENGTHS: dict[Dataset, dict[str, Any]] = {  # of the runs that pictures are of; CIFAR-10 has the paper's
    "cifar10": {},
    "faces": {"blocks": "plain", **SHORT},
    "imagenet": {"blocks": "plain", **SHORT},
}
LARGEST = 300_000  # bytes of a picture as PNG
WIDEST = 2_000  # pixels of a picture that is not kept exactly
STUDIES = {CLIENTS: (make_clients, draw_clients), PRIOR: (prior.make_prior_table, prior.draw_prior)}
PLOTS = (*STUDIES, *FROM_RECORDS, *TRACED, "neighborhoods", *MEASURED)  # few colors: a palette will do


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
    yield make_scale(Options("cifar10", seeds=3, partial=True), records)
    yield make_scale(Options("faces", seeds=1, **LENGTHS["faces"]), records)


def studies(records: Path) -> dict[str, Table]:
    """The tables of the studies that have records in a folder of their own."""
    return {
        name: make(Options(runs=records / name, records=(), partial=True))
        for name, (make, _) in STUDIES.items()
        if (records / name).is_dir()
    }


def write_tables(records: Path = RECORDS, docs: Path = DOCS) -> list[Path]:
    every = Records([records])
    texts = {table.name: as_csv(table) for table in (*tables(every), *studies(records).values())}
    files = tried.csv_files(records, every) | claim_list.csv_files(records, every)
    texts |= {name: lines_as_csv(lines) for name, lines in files.items()}
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
