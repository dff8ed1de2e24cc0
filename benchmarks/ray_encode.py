"""What Ray costs `topovq encode` over `torchrun`, and what a second process gains with either.

    python -m benchmarks.ray_encode [--images 20000] [--rounds 3] [--out benchmarks/results/ray_encode.csv]

20,000 JPEG files of 64x64 in ten tar files, the default `vqvae` with weights as they start, on the CPU.
Each command runs as a process of its own, in turn, `--rounds` times. Encoding begins when the first file is opened for
writing and ends when the last has its name: that leaves out how long Python, torch and Ray take to start, which is the
rest of the command. CPU seconds are those of all processes of the command in that time, Ray's own included; other load
on the machine disturbs them less. The best round of each counts. The file is written after every round.

All have one thread a process, batches of 64, and decode images themselves. Memory that is freed stays with the process,
by variables of glibc. Without them the bare encoder, in its main thread, gives large blocks back and has them filled
with zeros anew; Ray's actor, in a thread of its own, does so more rarely, which is no merit of Ray. The last row is the
bare encoder without them.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from benchmarks.loader import cpu_name
from topovq.tokenizer.data import photo_crops
from topovq.tokenizer.models import VQVAE
from topovq.tokenizer.training.record import environment

SHARDS, SIZE = 10, 64
PR_SET_CHILD_SUBREAPER = 36
KEPT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
# Who starts it, how many processes, and what becomes of memory that was freed.
ENGINES = [
    ("bare", 1, "kept"), ("torchrun", 1, "kept"), ("ray", 1, "kept"), ("torchrun", 2, "kept"), ("ray", 2, "kept"),
    ("bare", 1, "given back"),
]  # fmt: skip


class Times(NamedTuple):
    """Seconds of the whole command, of the encoding alone, and of the CPU in that time."""

    command: float
    encoding: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ray_encode.csv")
    options = parser.parse_args()
    found: dict[tuple[str, int, str], list[Times]] = {engine: [] for engine in ENGINES}
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what Ray starts and leaves behind is counted here
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, options.images)
        for number in range(options.rounds):
            for engine in ENGINES:
                found[engine].append(measure(folder, *engine))
                print(number, *engine, *(f"{seconds:.1f} s" for seconds in found[engine][-1]), flush=True)
            write(options.out, found, options.images)


def write(path: Path, found: dict[tuple[str, int, str], list[Times]], images: int) -> None:
    best = {engine: Times(*map(min, zip(*times))) for engine, times in found.items()}
    bare = best["bare", 1, "kept"]
    rows = [
        {
            "commit": environment(torch.device("cpu"), 1)["commit"], "cpu": cpu_name(), "cores": os.cpu_count(),
            "python": platform.python_version(), "torch": torch.__version__, "ray": version("ray"), "images": images,
            "rounds": len(found[engine, processes, memory]), "engine": engine, "processes": processes,
            "freed_memory": memory,
            "command_s": round(times.command, 1), "encoding_s": round(times.encoding, 1),
            "images_per_s": round(images / times.encoding, 1),
            "share_of_bare": round(bare.encoding / times.encoding, 3),
            "times_one_process": round(best[engine, 1, memory].encoding / times.encoding, 2),
            "cpu_s": round(times.cpu, 1), "images_per_cpu_s": round(images / times.cpu, 1),
            "cpu_share_of_bare": round(bare.cpu / times.cpu, 3),
        }
        for (engine, processes, memory), times in best.items()
    ]  # fmt: skip
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows written to {path}")


def make(folder: Path, images: int) -> None:
    torch.manual_seed(0)
    VQVAE(image_size=SIZE).save_pretrained(folder / "run")
    (folder / "shards").mkdir()
    each = images // SHARDS
    for shard in range(SHARDS):
        with tarfile.open(folder / "shards" / f"{shard}.tar", "w") as tar:
            for number, crop_3SS in enumerate(photo_crops(each, SIZE, seed=shard).numpy()):
                file = io.BytesIO()
                Image.fromarray(np.ascontiguousarray(crop_3SS.transpose(1, 2, 0))).save(file, "JPEG", quality=90)
                member = tarfile.TarInfo(f"{shard}-{number:06d}.jpg")
                member.size = file.tell()
                file.seek(0)
                tar.addfile(member, file)


def measure(folder: Path, engine: str, processes: int, memory: str) -> Times:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *start * (engine == "torchrun"), "-m", "topovq", "encode", "run", "shards"]
    command += ["-o", "out/tokens.parquet", "--device", "cpu", "--workers", "0", "--batch-size", "64"]
    command += ["--engine", "ray", "--actors", str(processes)] * (engine == "ray")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TOPOVQ_CACHE": str(folder / "cache")}
    variables |= KEPT if memory == "kept" else {}
    out = folder / "out"
    out.mkdir()
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # sockets want short paths
        began = time.time()
        process = subprocess.Popen(command, cwd=folder, env=variables | {"RAY_TMPDIR": short}, stdout=sys.stderr)
        first, seen, before, cpu = 0.0, {}, 0.0, 0.0
        while process.poll() is None:
            seen |= cpu_of_children()  # of a process that has ended, what it had when it was last seen
            if not first and any(out.iterdir()):
                first, before = time.time(), sum(seen.values())
            if first and not any(out.glob(".*.tmp")) and len(list(out.iterdir())) == files_of(engine, processes):
                cpu = cpu or sum(seen.values()) - before
            time.sleep(0.1)
        took = time.time() - began
    if process.returncode or not cpu:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    files = list(out.iterdir())
    last = max(path.stat().st_mtime for path in files)
    for path in files:
        path.unlink()
    out.rmdir()
    return Times(took, last - first, cpu)


def files_of(engine: str, processes: int) -> int:
    return SHARDS if engine == "ray" else processes


def cpu_of_children() -> dict[int, float]:
    """CPU seconds of each process below this one."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
            ticks[int(stat.parent.name)] = int(fields[11]) + int(fields[12])

    def is_below(process: int) -> bool:
        while process in parents and process != os.getpid():
            process = parents[process]
        return process == os.getpid()

    ours = (process for process in parents if process != os.getpid() and is_below(process))
    return {process: ticks[process] / os.sysconf("SC_CLK_TCK") for process in ours}


if __name__ == "__main__":
    main()
