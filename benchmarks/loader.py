"""What the `folder` loader costs over plain Pillow: decode and resize the same files, nothing else.

    python benchmarks/loader.py [--images 256] [--workers 2] [--repeats 10] [--seconds 1]

Plain is a loop of `Image.open(...).resize(...)` in as many processes as the loader has workers, each over its share of
the files, the result thrown away: it neither takes the pixels out of Pillow nor hands them to another process. Taking
them out (`tobytes`, which any loader must do) is measured as well. All run in turn, `--seconds` at a time; the best of
each counts, which other load on the machine disturbs least, and the overhead is also given as the median over repeats
of the ratio of neighbors. The files are crops of the embedded photographs, saved as JPEG.
"""

import argparse
import csv
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from topovq.tokenizer.data import open_source, photo_crops

CASES = [((256, 256), 256), ((500, 375), 256), ((500, 375), 128), ((1600, 1200), 256)]  # (width, height) -> size
BATCH = 64
RESULTS = Path(__file__).parent / "results" / "loader.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256, help="files of each size, and images per measurement")
    parser.add_argument("--workers", type=int, default=2, help="processes of either side")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each")
    parser.add_argument("--seconds", type=float, default=1.0, help="least length of a measurement")
    options = parser.parse_args()
    table = Table(
        "file", "size", *(f"{name}, images/s" for name in ("plain", "tobytes", "loader")), "overhead", "median"
    )
    rows = []
    for shape, size in CASES:
        with tempfile.TemporaryDirectory() as folder:
            paths = make_files(Path(folder), shape, options.images)
            speeds = measure(folder, paths, size, options.workers, options.repeats, options.seconds)
        plain, pixels, loader = (max(column) for column in zip(*speeds))
        overhead, median = plain / loader - 1, statistics.median(row[0] / row[2] - 1 for row in speeds)
        figures = (f"{plain:,.0f}", f"{pixels:,.0f}", f"{loader:,.0f}", f"{overhead:+.1%}", f"{median:+.1%}")
        table.add_row(f"{shape[0]}x{shape[1]}", str(size), *figures)
        rows.append({
            **facts(), "workers": options.workers, "images": options.images, "n": options.repeats,
            "width": shape[0], "height": shape[1], "size": size,
            "plain_images_per_s": round(plain), "tobytes_images_per_s": round(pixels),
            "loader_images_per_s": round(loader), "overhead": round(overhead, 4), "median_overhead": round(median, 4),
        })  # fmt: skip
    Console().print(table)
    write(rows)


def make_files(folder: Path, shape: tuple[int, int], number: int) -> list[str]:
    paths = []
    for i, crop_3SS in enumerate(photo_crops(number, 256).numpy()):
        path = folder / f"{i:05}.jpg"
        Image.fromarray(np.ascontiguousarray(crop_3SS.transpose(1, 2, 0))).resize(shape).save(path, quality=90)
        paths.append(str(path))
    return paths


def measure(
    folder: str, paths: list[str], size: int, workers: int, repeats: int, seconds: float
) -> list[tuple[float, float, float]]:
    """Images per second of plain Pillow, of Pillow and `tobytes`, and of the loader, a row each repeat."""
    shares = [paths[worker::workers] for worker in range(workers)]
    speeds = []
    with multiprocessing.Pool(workers) as pool, open_source("folder", folder, size=size, workers=workers) as source:
        stream = source.train(BATCH, seed=0)
        for repeat in range(repeats + 1):
            plain, pixels = (
                sum(pool.starmap(decode_plainly, [(share, size, seconds, out) for share in shares], chunksize=1))
                for out in (False, True)
            )
            loader = take(stream, workers, seconds)
            if repeat:  # the first time warms up
                speeds.append((plain, pixels, loader))
            time.sleep(0.5 + 3 * workers * BATCH / loader)  # the workers fill their slots and fall silent
    return speeds


def take(stream: Iterator[torch.Tensor], workers: int, seconds: float) -> float:
    """Images per second of the loader. What its workers had ready from before costs nothing: it is left out."""
    for _ in range(4 * workers):
        next(stream)
    batches, start = 0, time.perf_counter()
    while batches % workers or time.perf_counter() < start + seconds:  # workers end their batches at the same time
        next(stream)
        batches += 1
    return batches * BATCH / (time.perf_counter() - start)


def decode_plainly(paths: list[str], size: int, seconds: float, take_pixels: bool) -> float:
    """Images per second of one process."""
    images, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        for path in paths:
            with Image.open(path) as image:
                width, height = image.size
                side = min(width, height)
                left, top = (width - side) / 2, (height - side) / 2
                box = (left, top, left + side, top + side)
                small = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
                if take_pixels:
                    small.tobytes()
        images += len(paths)
    return images / (time.perf_counter() - start)


def facts() -> dict[str, object]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "pillow": PIL.__version__}
    return {"date": datetime.now(UTC).date().isoformat(), "cpu": cpu_name(), "cores": os.cpu_count(), **versions}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def write(rows: list[dict[str, object]]) -> None:
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows written to {RESULTS}")


if __name__ == "__main__":
    main()
