"""What the `folder` loader costs over plain Pillow: decode and resize the same files, nothing else.

    python benchmarks/loader.py [--images 256] [--workers 2] [--repeats 10]

Plain is a loop of `Image.open(...).resize(...)` in as many processes as the loader has workers, each over its share of
the files, the result thrown away: it neither hands pixels to another process nor puts planes in order. Both run in turn
and the best of each counts, which other load on the machine disturbs least. The files are crops of the embedded
photographs, saved as JPEG.
"""

import argparse
import csv
import multiprocessing
import os
import platform
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from topovq.data import open_source, photo_crops

CASES = [((256, 256), 256), ((500, 375), 256), ((500, 375), 128), ((1600, 1200), 256)]  # (width, height) -> size
RESULTS = Path(__file__).parent / "results" / "loader.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256, help="files of each size, and images per measurement")
    parser.add_argument("--workers", type=int, default=2, help="processes of either side")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of either side")
    options = parser.parse_args()
    table = Table("file", "size", "plain, images/s", "loader, images/s", "overhead")
    rows = []
    for shape, size in CASES:
        with tempfile.TemporaryDirectory() as folder:
            paths = make_files(Path(folder), shape, options.images)
            plain, loader = measure(folder, paths, size, options.workers, options.repeats)
        overhead = plain / loader - 1
        table.add_row(f"{shape[0]}x{shape[1]}", str(size), f"{plain:,.0f}", f"{loader:,.0f}", f"{overhead:+.1%}")
        rows.append({
            **facts(), "workers": options.workers, "images": options.images, "n": options.repeats,
            "width": shape[0], "height": shape[1], "size": size,
            "plain_images_per_s": round(plain), "loader_images_per_s": round(loader), "overhead": round(overhead, 4),
        })  # fmt: skip
    Console().print(table)
    append(rows)


def make_files(folder: Path, shape: tuple[int, int], number: int) -> list[str]:
    paths = []
    for i, crop_3SS in enumerate(photo_crops(number, 256).numpy()):
        path = folder / f"{i:05}.jpg"
        Image.fromarray(np.ascontiguousarray(crop_3SS.transpose(1, 2, 0))).resize(shape).save(path, quality=90)
        paths.append(str(path))
    return paths


def measure(folder: str, paths: list[str], size: int, workers: int, repeats: int) -> tuple[float, float]:
    """Images per second of plain Pillow and of the loader."""
    batch = 64
    batches = max(1, len(paths) // batch)
    shares = [(paths[worker::workers], size) for worker in range(workers)]
    plain, loader = [], []
    with multiprocessing.Pool(workers) as pool, open_source("folder", folder, size=size, workers=workers) as source:
        stream = source.train(batch, seed=0)
        for _ in range(repeats):
            for _ in range(2 * workers + 1):  # what the workers had ready from before costs nothing: leave it out
                next(stream)
            start = time.perf_counter()
            for _ in range(batches):
                next(stream)
            loader.append(batches * batch / (time.perf_counter() - start))
            time.sleep(0.5 + 3 * workers * batch / loader[-1])  # the workers fill their slots and fall silent
            start = time.perf_counter()
            pool.map(decode_plainly, shares, chunksize=1)
            plain.append(len(paths) / (time.perf_counter() - start))
    return max(plain), max(loader)


def decode_plainly(share: tuple[list[str], int]) -> None:
    paths, size = share
    for path in paths:
        with Image.open(path) as image:
            width, height = image.size
            side = min(width, height)
            left, top = (width - side) / 2, (height - side) / 2
            image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


def facts() -> dict[str, object]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "pillow": PIL.__version__}
    return {"date": datetime.now(UTC).date().isoformat(), "cpu": cpu_name(), "cores": os.cpu_count(), **versions}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def append(rows: list[dict[str, object]]) -> None:
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows added to {RESULTS}")


if __name__ == "__main__":
    main()
