"""Train the runs behind the paper's claims on a GPU, as far as the time goes; the same command goes on.

python -m experiments.paper.run --plan                                    groups, runs that are left, GPU minutes
python -m experiments.paper.run --out OUT --limit 540                     CIFAR-10, most valuable groups first
python -m experiments.paper.run --out OUT --limit 540 --only early gas    these groups alone
python -m experiments.paper.run --out OUT --large --faces F --imagenet I  the groups at 256x256
python -m experiments.paper.run --out OUT --tiny --device cpu             all groups at a tiny size, to try it

python -m experiments.paper.run --collect OUT                             take what came back into records/paper

OUT gets a record for each finished run, and what was measured of models, a few runs at a time. Runs that records/paper
or OUT has are not repeated. Within --limit no run is started that cannot end in it, unless --cut says so: then the rest
of the time goes to runs that are cut off, and the same command goes on from their checkpoints in --runs. Needs no
command-line packages. Records of the same run that were there before go to records/replaced, which tables leave out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from experiments.figures.draw import draw
from experiments.paper.groups import Group, groups, large_groups
from experiments.paper.measured import FAILED, SUFFIX, measure, read_failed
from experiments.records import RECORDS, REPLACED, Record, Records, resolved
from experiments.runs import missing
from experiments.specs import Options
from topovq.distributed import pick_device
from topovq.storage import write_atomic
from topovq.tokenizer.data import Source
from topovq.tokenizer.data.cifar10 import CACHED, NORMALIZATION
from topovq.tokenizer.data.cifar10_copies import IMAGES
from topovq.tokenizer.data.files import cache_dir
from topovq.tokenizer.training import Interrupted, TrainConfig, open_data, read_record, train_all
from topovq.tokenizer.training.many import AT_ONCE, LARGE
from topovq.tokenizer.training.record import RECORD_FILE
from topovq.tokenizer.training.watch import Diverged

SIDE, TILES = 32, 100  # pixels of an image, images along a side of a sheet
FIRST = ((59, 62, 63), (154, 177, 187))  # the upper left pixels of the first two images of CIFAR-10
DATA = ("faces", "imagenet")  # data sets that lie where an option says
SPARE, COMPILING = 15.0, 60.0  # seconds that are left for the last records, and that the first runs take longer
TINY_MODEL = {"hidden": 8, "residual_layers": 1, "residual_hidden": 4}
PICTURES = ("map", "shifts", "shifts-wide", "shift-psnr", "topography")


def tiny(config: TrainConfig) -> TrainConfig:
    """A run of seconds on the photographs of the package, with the same rule and blocks."""
    rule = {name: value for name, value in config.quantizer_options.items() if name != "grid"}
    sizes: dict[str, Any] = {"codebook_size": 16, "code_dim": 4, "steps": 40, "batch_size": 4, "image_size": None}
    often: dict[str, Any] = dict.fromkeys(("validate_every", "checkpoint_every", "log_every"), 20)
    model: dict[str, Any] = {"model_options": config.model_options | TINY_MODEL, "quantizer_options": rule}
    return replace(config, data="photos", data_path=None, precision="fp32", device="cpu", **sizes, **often, **model)


def unpack_cifar10(folder: Path) -> None:
    """Put CIFAR-10 where the package looks for it, from the sheets (images in rows) that lie in a folder, by name."""
    cached = cache_dir() / CACHED
    if cached.exists():
        return
    sheets = [np.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.glob("*.webp"))]
    if not sheets or {sheet.shape for sheet in sheets} != {(SIDE * TILES, SIDE * TILES, 3)} or len(sheets) != 5:
        side = SIDE * TILES
        raise FileNotFoundError(f"{folder} must hold five sheets *.webp of {side} x {side} pixels; got {len(sheets)}")
    tiled = np.stack(sheets).reshape(5, TILES, SIDE, TILES, SIDE, 3).transpose(0, 1, 3, 5, 2, 4)
    images = np.ascontiguousarray(tiled.reshape(-1, 3, SIDE, SIDE))
    corners = tuple(tuple(int(value) for value in image[:, 0, 0]) for image in images[:2])
    mean, std = images.mean((0, 2, 3)), images.std((0, 2, 3))
    if corners != FIRST or not np.allclose([mean, std], NORMALIZATION, atol=0.01):
        raise ValueError(f"{folder} does not hold CIFAR-10 in its order: corners {corners}, mean {mean}, std {std}")
    tensors = {
        "train_images": torch.from_numpy(images),
        "train_labels": torch.zeros(IMAGES["train"], dtype=torch.int64),
        "test_images": torch.zeros(IMAGES["test"], 3, SIDE, SIDE, dtype=torch.uint8),
        "test_labels": torch.zeros(IMAGES["test"], dtype=torch.int64),
    }
    cached.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, cached)


def plan(wanted: list[Group], records: Records, failed: Iterable[str] = ()) -> list[tuple[Group, list[TrainConfig]]]:
    """Of each group the runs that neither records nor an earlier group have, and that did not fail before."""
    seen = set(failed)
    left = []
    for group in wanted:
        todo = [config for config in missing(group.configs, records) if resolved(config).run_id not in seen]
        seen |= {resolved(config).run_id for config in todo}
        left.append((group, todo))
    return left


def show(left: Iterable[tuple[Group, list[TrainConfig]]]) -> None:
    total = 0.0
    print(f"{'group':26}{'runs':>6}{'left':>6}{'GPU minutes':>13}")
    for group, todo in left:
        minutes = len(todo) * group.seconds / 60
        total += minutes
        print(f"{group.name:26}{len(group.configs):6}{len(todo):6}{minutes:13.1f}")
    print(f"{'all':38}{total:13.1f}")


def keep(folder: Path, out: Path, commit: str | None) -> Record | None:
    """The record of a finished run, copied without the paths of this machine; None of one that is not finished."""
    if not (folder / RECORD_FILE).exists():
        return None
    run = Record(folder / RECORD_FILE, read_record(folder / RECORD_FILE))
    if not run.finished:
        return None
    config = run.config | {"out": f"runs/{run.config['id']}", "data_path": None, "source_path": None}
    config |= {"commit": commit, "dirty": False} if commit else {}
    lines = [json.dumps(line) for line in (config, *run.lines[1:])]
    write_atomic(out / f"{run.config['id']}.jsonl", ("\n".join(lines) + "\n").encode())
    return run


def keep_failure(run: str, seed: int, message: str, out: Path) -> None:
    """A run whose weights became NaN has no final line: a file says that it was tried."""
    found = {"run": run, "seed": seed, "failed": message}
    write_atomic(out / f"{run}{FAILED}", (json.dumps(found) + "\n").encode())


class Sweep:
    """Groups of runs, trained in waves of as many as run at once, and kept as a wave ends."""

    def __init__(self, asked: argparse.Namespace, say: Callable[[str], None] = print) -> None:
        self.asked, self.say = asked, say
        self.device = pick_device(asked.device)
        self.began = time.monotonic()
        self.pace, self.compiling = 1.0, COMPILING  # how much longer than expected the last wave took
        self.broken = False

    def attempt(self, group: Group, todo: list[TrainConfig]) -> bool:
        """`train`, where a fault in one group is told and leaves the time to the others."""
        try:
            return self.train(group, todo)
        except Interrupted:
            raise
        except Exception:
            traceback.print_exc()
            self.say(f"{group.name} broke off")
            self.broken = True
            return False

    def train(self, group: Group, todo: list[TrainConfig]) -> bool:
        """Whether the time was enough for all of these. Raises Interrupted when it is over within a wave, after what
        is finished was kept."""
        done, number = 0, len(todo)
        while wave := todo[: self.fitting(group, todo)]:
            began = time.monotonic()
            try:
                self._train(group, wave)
            finally:
                kept = [keep(self._folder(config), self.asked.out, self.asked.commit) for config in wave]
                done += sum(run is not None for run in kept)
                self.say(f"{group.name}: {done} of {number} runs are done, after {self._spent():.0f} s")
            self.measure(group)
            took = time.monotonic() - began - self.compiling
            self.pace, self.compiling = max(1.0, took / (group.seconds * len(wave))), 0.0
            todo = todo[len(wave) :]
        return not todo

    def fitting(self, group: Group, todo: list[TrainConfig]) -> int:
        """How many of these are to be run at once now: none where the time is too short for one."""
        if not todo:
            return 0
        small = (todo[0].batch_size or 0) * (todo[0].image_size or 0) ** 2 <= LARGE
        most = min(len(todo), self.asked.jobs or (AT_ONCE if small else 1))
        if self.asked.limit is None or self.asked.cut:
            return most
        time_left = self.asked.limit - self._spent() - SPARE - self.compiling
        return min(most, max(0, int(time_left / (group.seconds * self.pace))))

    def _spent(self) -> float:
        return time.monotonic() - self.began

    def _folder(self, config: TrainConfig) -> Path:
        return self.asked.runs / resolved(config).run_id

    def _train(self, group: Group, wave: list[TrainConfig]) -> None:
        placed = {self._folder(config): self._here(config) for config in wave}
        left = {folder: replace(config, out=folder, resume=True) for folder, config in placed.items()}
        while left:
            try:
                train_all(list(left.values()), jobs=self.asked.jobs, quiet=True)
                left = {}
            except Diverged as error:  # a run that failed is a result; the others go on from their checkpoints
                folder = Path(error.__notes__[-1])
                self.say(f"{group.name}: {folder.name} failed: {error}")
                keep_failure(folder.name, left.pop(folder).seed, str(error), self.asked.out)

    def measure(self, group: Group) -> None:
        """Measure the models of a group that are here, those of earlier calls, too."""
        folders = [self._folder(config) for config in group.configs if group.measured]
        with ExitStack() as stack:
            opened: dict[str, Source] = {}
            for folder in folders:
                run = keep(folder, self.asked.out, self.asked.commit)
                if run is None or (self.asked.out / f"{run.config['id']}{SUFFIX}").exists():
                    continue
                config = run.config
                if config["data"] not in opened:
                    path = config["data_path"] and Path(config["data_path"])
                    source = open_data(config["data"], path, config["image_size"], 0)
                    opened[config["data"]] = stack.enter_context(source)
                measure(run, group.measured, opened[config["data"]], self.device, self.asked.out)

    def _here(self, config: TrainConfig) -> TrainConfig:
        """The run with its data where they lie on this machine."""
        return replace(config, data_path=getattr(self.asked, config.data) if config.data in DATA else None)


WHY = """# Replaced records

Runs that were done again, with the same configuration. These records are of kernels before a race and a fault of the
search were mended. Tables leave them out; `python -m experiments NAME --records records/replaced` reads them.
"""


def collect(source: Path, records: Path) -> None:
    """Take records and measures into a folder of records; what its neighbors told of the same runs is replaced."""
    fresh = {path.stem: path for path in sorted(source.glob("*.jsonl"))}
    old = Records([records.parent])
    for run in [run for same in Records([source]).found for run in old.found.get(same, [])]:
        if records not in run.path.parents:
            replaced = records.parent / REPLACED
            replaced.mkdir(exist_ok=True)
            write_atomic(replaced / "README.md", WHY.encode())
            run.path.rename(replaced / run.path.name)
            print(f"replaced: {run.path}")
    for path in (*fresh.values(), *sorted(source.glob(f"*{SUFFIX}")), *sorted(source.glob(f"*{FAILED}"))):
        write_atomic(records / path.name, path.read_bytes())
    print(f"{len(fresh)} records are in {records}; python -m experiments.pages draws the pages' tables from them")


def _stop(signum: int, frame: object) -> None:
    """The time is over while nothing is being trained."""
    raise Interrupted(signum, "stopped")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the records of finished runs")
    parser.add_argument("--limit", type=float, help="seconds; no run is started that cannot end within them")
    parser.add_argument("--cut", action="store_true", help="start runs until --limit, and stop them with checkpoints")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="these groups alone")
    parser.add_argument("--plan", action="store_true", help="say what is left, and run nothing")
    parser.add_argument("--large", action="store_true", help="the groups at 256x256")
    parser.add_argument("--figures", action="store_true", help="when all is done, draw pictures of models in --runs")
    parser.add_argument("--cifar", type=Path, help="folder with CIFAR-10 as five sheets *.webp")
    parser.add_argument("--faces", type=Path, help="faces at 256x256: a folder or tar shards")
    parser.add_argument("--imagenet", type=Path, help="ImageNet: a folder or tar shards")
    parser.add_argument("--records", type=Path, default=RECORDS / "paper", help="folder with records of done runs")
    parser.add_argument("--collect", type=Path, metavar="OUT", help="take a folder's records into --records")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs, with their checkpoints")
    parser.add_argument("--commit", help="what records say the code is, where there is no repository")
    parser.add_argument("--jobs", type=int, help="runs at once; six small ones on a GPU if not given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="tiny models for seconds, two seeds, on the CPU")
    asked = parser.parse_args(arguments)
    if asked.collect:
        collect(asked.collect, asked.records)
        return 0
    wanted = large_groups() if asked.large else groups()
    if unknown := set(asked.only or ()) - {group.name for group in wanted}:
        parser.error(f"--only: there is no group {min(unknown)}; there are {', '.join(g.name for g in wanted)}")
    if asked.only:
        wanted = [group for group in wanted if group.name in asked.only]
    if asked.tiny:
        wanted = [replace(group, configs=[tiny(c) for c in group.configs if c.seed < 2]) for group in wanted]
    folders = [folder for folder in (asked.records, asked.out) if folder and folder.is_dir()]
    left = plan(wanted, Records(folders), read_failed(folders))
    show(left)
    if asked.plan:
        return 0
    if asked.out is None:
        parser.error("--out is needed: the folder for records of finished runs")
    asked.out.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(asked)
    signal.signal(signal.SIGTERM, _stop)
    timer = threading.Timer(asked.limit or 0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    if asked.limit:
        timer.start()
    try:
        if asked.cifar:
            unpack_cifar10(asked.cifar)
        for group, _ in left:
            sweep.measure(group)  # models of earlier calls
        whole = all([sweep.attempt(group, todo) for group, todo in left])
    except Interrupted:
        whole = False
    finally:
        timer.cancel()
    if sweep.broken:
        print("the same command goes on once the faults above are mended")
    elif not whole:
        print("the time is over: the same command goes on")
    if asked.figures and whole:
        for name in PICTURES:
            try:
                draw(name, Options(blocks="paper", runs=asked.runs, records=(), out=asked.out / "figures"))
            except FileNotFoundError as error:
                print(error)
    return int(sweep.broken)


if __name__ == "__main__":
    raise SystemExit(main())
