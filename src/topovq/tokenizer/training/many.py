"""Many runs, several at once: `train_all(configs) -> results`.

A run of the size of the paper's CIFAR-10 model leaves most of a GPU idle at most times. So one process takes a step of
each of several runs in turn, every run on a stream of its own, and the device does what it can at once. What was
compiled for one serves all. On the CPU, runs go to processes of their own.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from topovq.distributed import World, pick_device
from topovq.tokenizer.data import Source, open_data
from topovq.tokenizer.models import QUANTIZERS
from topovq.tokenizer.training.base import RunResult, check_folder
from topovq.tokenizer.training.config import TrainConfig
from topovq.tokenizer.training.interrupt import Interrupted, StopRequest
from topovq.tokenizer.training.loop import Run, train
from topovq.tokenizer.training.step import fastest_convolutions
from topovq.tokenizer.training.watch import Diverged

AT_ONCE = 6  # small runs on one GPU: on an H200 more were no faster (benchmarks/results/at_once.csv)
LARGE = 2**20  # pixels of a batch from which on one run fills a GPU
SHOWN_EVERY = 50  # steps of all runs


def train_all(
    configs: Sequence[TrainConfig], *, jobs: int | None = None, quiet: bool = False, source: Source | None = None
) -> list[RunResult]:
    """Train what is not finished of these, `jobs` at once, and return the results in the order of `configs`.

    Each goes on where it was cut off. `source` replaces the data set that the configurations name. After Ctrl-C or
    SIGTERM every run writes a checkpoint, and Interrupted is raised.
    """
    if jobs is not None and (not isinstance(jobs, int) or jobs < 1):
        raise ValueError(f"jobs={jobs!r} must be a whole number of at least 1")
    resolved = [replace(c, resume=True).resolve(pick_device(c.device).type) for c in configs]
    todo = {config.out: config for config in resolved if check_folder(config) is None}
    if todo:
        with _Progress(list(todo.values()), len(resolved), quiet) as progress:
            if pick_device(resolved[0].device).type == "cuda":
                _in_turns(list(todo.values()), jobs, source, progress)
            elif jobs is None or jobs == 1 or source is not None:
                for config in todo.values():
                    _in_turns([config], 1, source, progress)
            else:
                _in_processes(list(todo.values()), jobs, progress)
    results = [check_folder(config) for config in resolved]
    assert all(result is not None for result in results)
    return [result for result in results if result is not None]


@dataclass
class _Lane:
    """One of the runs under way."""

    run: Run
    steps: Generator[None, None, RunResult]
    stream: torch.cuda.Stream | None
    seen: int = 0
    """Steps of it that the progress bar knows of."""


def _in_turns(configs: list[TrainConfig], jobs: int | None, source: Source | None, progress: _Progress) -> None:
    device = pick_device(configs[0].device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    world = World(0, 1, device)
    waiting, lanes = deque(configs), list[_Lane]()
    streams: list[
        torch.cuda.Stream | None
    ] = []  # of runs that are over: torch has few, and two runs at once must not share one
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        stack.enter_context(fastest_convolutions())
        opened: dict[tuple[object, ...], Source] = {}

        def data_of(config: TrainConfig) -> Source:
            key = (config.data, config.data_path, config.image_size, config.workers)
            if source is None and key not in opened:
                opened[key] = stack.enter_context(open_data(*key))
            return source if source is not None else opened[key]

        interrupted: Interrupted | None = None
        try:
            while lanes or (waiting and interrupted is None):
                while waiting and interrupted is None and len(lanes) < (jobs or _at_once(waiting[0], data_of, cuda)):
                    config = waiting.popleft()
                    run = Run(config, data_of(config), world, True, jobs or _at_once(config, data_of, cuda))
                    stream = (streams.pop() if streams else torch.cuda.Stream(device)) if cuda else None
                    lanes.append(_Lane(run, run.steps(stop), stream))
                for lane in list(lanes):
                    try:
                        with torch.cuda.stream(lane.stream):  # of None: changes nothing
                            next(lane.steps)
                    except StopIteration as end:
                        lanes.remove(lane)
                        streams.append(lane.stream)
                        progress.finished(lane.run.config, end.value)
                    except Interrupted as error:
                        lanes.remove(lane)
                        interrupted = error
                    except Diverged as error:
                        error.add_note(f"{lane.run.folder}")  # which of them it was
                        raise
                    progress.stepped(lane.run.step - lane.seen)
                    lane.seen = lane.run.step
        finally:
            for lane in lanes:
                lane.steps.close()
        if interrupted is not None:
            raise interrupted


def _at_once(config: TrainConfig, data_of: Callable[[TrainConfig], Source], cuda: bool) -> int:
    """How many such runs fill the device."""
    assert config.batch_size is not None
    return AT_ONCE if cuda and config.batch_size * data_of(config).size ** 2 <= LARGE else 1


def _in_processes(configs: list[TrainConfig], jobs: int, progress: _Progress) -> None:
    """Runs in processes of their own, which share the machine's threads."""
    threads = max(1, torch.get_num_threads() // jobs)
    modules = {QUANTIZERS[config.quantizer][0].__module__ for config in configs}  # some were added to the package's
    context = multiprocessing.get_context("spawn")
    with (
        StopRequest() as stop,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(threads, modules)) as pool,
    ):
        futures = {pool.submit(train, config, quiet=True): config for config in configs}
        pending = set(futures)
        interrupted: Interrupted | None = None
        told = False
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in done:
                if future.cancelled():
                    continue
                error = future.exception()
                if isinstance(error, Interrupted):
                    interrupted = error
                elif error is not None:
                    for other in pending:
                        other.cancel()
                    raise error
                else:
                    progress.finished(futures[future], future.result())
                    progress.stepped(futures[future].steps or 0)
            if stop.signum and not told:
                told = True
                for future in pending:
                    future.cancel()
                for process in list(pool._processes.values()):
                    if process.pid is not None and process.is_alive():
                        process.terminate()  # SIGTERM: each writes its checkpoint
                interrupted = interrupted or Interrupted(stop.signum, "stopped; the same command continues")
        if interrupted is not None:
            raise interrupted


def _start_worker(threads: int, modules: Iterable[str]) -> None:
    torch.set_num_threads(threads)
    for name in modules:
        importlib.import_module(name)
    for name in ("SIGINT", "SIGHUP"):  # they reach all of a terminal's processes; the parent decides
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A run whose sweep was killed would go on unseen, hold its folder, and then wait for ever for the next."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # as if it had been killed as well: the next sweep goes on from the last checkpoint


class _Progress:
    """How far all of it is: a bar over the steps of all runs, and a line for each that is finished."""

    def __init__(self, configs: list[TrainConfig], number: int, quiet: bool) -> None:
        console = Console(quiet=quiet, highlight=False)
        self.left, self.number, self.unseen = len(configs), number, 0
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal or quiet,
        )
        self.task = self.bar.add_task(self._title(), total=sum(config.steps or 0 for config in configs))

    def __enter__(self) -> _Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def _title(self) -> str:
        return f"{self.number - self.left} of {self.number} runs done"

    def stepped(self, steps: int) -> None:
        self.unseen += steps
        if self.unseen >= SHOWN_EVERY:
            self.bar.advance(self.task, self.unseen)
            self.unseen = 0

    def finished(self, config: TrainConfig, result: RunResult) -> None:
        self.left -= 1
        self.bar.update(self.task, description=self._title())
        self.bar.console.print(
            f"{self._title()}: {result.run_id} {config.quantizer} K={config.codebook_size} seed {config.seed}: "
            f"best loss {result.best_loss:.5f} in {result.seconds:.0f} s",
            soft_wrap=True,
        )
