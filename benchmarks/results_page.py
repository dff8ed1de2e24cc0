"""The results page from the records: rewrites the blocks of docs/results.md, docs/results/*.csv and the pictures.

    python -m benchmarks.results_page
    python -m benchmarks.results_page --figures reproduced

Tables, sentences and curves come from records/ alone. Pictures and measures of models come from a folder into which
`topovq reproduce FIGURE --dataset ... --out reproduced` wrote them; those that are not there stay as they are.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks.results_blocks import BLOCKS, filled
from benchmarks.results_made import SHOWN, Source, picture_path
from experiments.figures import FIGURES, FROM_RECORDS, draw, figures_of, needs
from experiments.sheet import as_csv
from topovq.storage import write_atomic

LARGEST = 300_000  # bytes of a picture as PNG
WIDEST = 2_000  # pixels of a picture that is not kept exactly
PLOTS = ("initialization", "perplexity", "neighborhoods", "shift-psnr", "topography")  # few colors: a palette will do
MOST_SEEDS = 32
RUNS = "runs"  # the text in a PNG that names the runs it was drawn from


def write_page(source: Source) -> list[Path]:
    """The CSV files of the tables, then the page."""
    written = []
    for dataset in SHOWN:
        for made in source.tables(dataset):
            written.append(source.docs / "results" / f"{made.sheet.name}.csv")
            write_atomic(written[-1], as_csv(made.sheet).encode())
    page = source.docs / "results.md"
    write_atomic(page, filled(page.read_text(), source).encode())
    return [*written, page]


def draw_curves(source: Source) -> list[Path]:
    """The figures that need no models, of every data set that was run."""
    written = []
    for dataset in SHOWN:
        length = source.length(dataset)
        names = [*FROM_RECORDS, *(["neighborhoods"] if dataset == "cifar10" else [])] if length else []
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                steps, batch_size = length or (None, None)
                options: dict[str, Any] = {
                    "dataset": dataset,
                    "steps": steps,
                    "batch_size": batch_size,
                    "partial": True,
                }
                drawn = draw(name, source.records, Path(folder), **options)[0]
                written.append(put(drawn, source, name, dataset, drawn_from(source, name, dataset)))
    return written


def drawn_from(source: Source, name: str, dataset: str) -> str:
    """The ids of the runs there are for a figure that is drawn from records."""
    steps, batch_size = source.length(dataset) or (None, None)
    every = needs(name, dataset=dataset, steps=steps, batch_size=batch_size, seeds=MOST_SEEDS)
    found = [source.library.finished(config) for config in every]
    return " ".join(sorted({run.config["id"] for run in found if run is not None}))


def take_figures(source: Source, folder: Path) -> list[Path]:
    """Pictures and measures that `topovq reproduce` wrote into a folder."""
    written = []
    for dataset in SHOWN:
        for name in figures_of(dataset):
            picture, rows = (folder / f"{name}-{dataset}.{kind}" for kind in ("png", "csv"))
            if name in FROM_RECORDS or not picture.exists():
                continue
            written.append(put(picture, source, name, dataset))
            if rows.exists():
                written.append(source.docs / "results" / rows.name)
                write_atomic(written[-1], rows.read_bytes())
    return written


def put(picture: Path, source: Source, name: str, dataset: str, runs: str = "") -> Path:
    """A picture beside the page: PNG, of few colors with a palette; where that is large WebP, exact if that is not."""
    with Image.open(picture) as opened:
        image = opened.convert("RGB")
    suffix, data = "png", _png(image, name in PLOTS, runs)
    for exact in (True, False):
        if len(data) > LARGEST:
            buffer = io.BytesIO()
            if not exact and image.width > WIDEST:
                image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.Resampling.LANCZOS)
            image.save(buffer, "webp", lossless=exact, quality=75, method=6)
            suffix, data = "webp", buffer.getvalue()
    path = picture_path(source.docs, name, dataset, suffix)
    write_atomic(path, data)
    picture_path(source.docs, name, dataset, "webp" if suffix == "png" else "png").unlink(missing_ok=True)
    return path


def _png(image: Image.Image, palette: bool, runs: str) -> bytes:
    buffer, facts = io.BytesIO(), PngInfo()
    if runs:
        facts.add_text(RUNS, runs)
    few = image.quantize(256, dither=Image.Dither.NONE) if palette else image
    few.save(buffer, "png", optimize=True, pnginfo=facts)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, help="folder that `topovq reproduce` wrote figures into")
    arguments = parser.parse_args()
    if arguments.figures is not None and not arguments.figures.is_dir():
        parser.error(f"there is no folder {str(arguments.figures)!r}")
    source = Source()
    written = draw_curves(source)
    if arguments.figures is not None:
        taken = take_figures(source, arguments.figures)
        if not taken:
            parser.error(f"{str(arguments.figures)!r} holds no figure named FIGURE-DATASET.png, such as {_example()}")
        written += taken
    written += write_page(source)
    print(f"{len(BLOCKS)} blocks; written: {', '.join(path.name for path in written)}")


def _example() -> str:
    return f"{next(name for name in FIGURES if name not in FROM_RECORDS and name != 'neighborhoods')}-cifar10.png"


if __name__ == "__main__":
    main()
