"""`topovq reproduce`: from the name of a table or figure to the runs it needs, to the table or figure."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.library import Library
from experiments.scale import make_scale
from experiments.sheet import FORMATS, Sheet, as_csv, markdown
from experiments.specs import QUICK, SCALE, SETTINGS, TABLES, configs
from experiments.sweep import missing, run_all
from experiments.table import make_table
from experiments.targets import targets
from topovq.storage import write_atomic
from topovq.tokenizer.models import check_name
from topovq.tokenizer.training import TrainConfig

EVERYTHING = "all"
MOST_QUICK_JOBS = 4  # processes of the quick version: each takes seconds to start


@dataclass(frozen=True)
class Request:
    """What is asked for, and where things lie; the fields are the options of the command."""

    dataset: str = "cifar10"
    seeds: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    jobs: int | None = None
    data_path: Path | None = None
    runs: Path = Path("runs")
    records: Sequence[Path] = ()
    out: Path = Path("reproduced")
    render_only: bool = False
    partial: bool = False
    format: str = "terminal"
    quick: bool = False
    codebooks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "batch_size", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r} must be at least 1")
        check_name("format", self.format, FORMATS)
        check_name("data set of the tables", self.dataset, SETTINGS)
        for folder in self.records:
            if not folder.is_dir():
                raise FileNotFoundError(f"there is no folder of records at {folder}")

    @property
    def library(self) -> Library:
        """The records there are now."""
        return Library([self.runs, *self.records])


def reproduce(
    what: str, request: Request, say: Callable[[str], None] = print, show: Callable[[str], object] = print
) -> list[Path]:
    """Run what is missing for `what` (a table, a figure, or "all"), then make it; the files it wrote.

    `say` is told how things go, `show` gets each table in the format asked for.
    """
    if request.quick:
        request = replace(request, dataset=QUICK)
    tables, figures = _named(what, request.dataset)
    if request.codebooks is not None and tables != [SCALE]:
        raise ValueError(f"codebooks={list(request.codebooks)} goes with {SCALE!r}, not with {what!r}")
    if not request.render_only:
        _run(tables, figures, request, say)
    written = []
    for name in tables:
        sheet = make_sheet(name, request)
        show(FORMATS[request.format](sheet))
        written += _write(name, sheet, request.out)
    for name in figures:
        written += _draw(name, request)
    return written


def _named(what: str, dataset: str) -> tuple[list[str], list[str]]:
    """The tables and the figures that are meant."""
    if what in (*TABLES, SCALE):
        return [what], []
    from experiments.figures import FIGURES, figures_of  # needs matplotlib, which tables do not

    check_name("table or figure", what, (*TABLES, SCALE, *FIGURES, EVERYTHING))
    return (tables_of(dataset), figures_of(dataset)) if what == EVERYTHING else ([], [what])


def tables_of(dataset: str) -> list[str]:
    """The paper's tables that have rows for a data set."""
    shown = {key[0] for key in targets() if key[1] == ("cifar10" if dataset == QUICK else dataset)}
    return [table for table in TABLES if table in shown]


def make_sheet(table: str, request: Request) -> Sheet:
    """A table from the records there are."""
    options: dict[str, Any] = {"seeds": request.seeds, "steps": request.steps, "batch_size": request.batch_size}
    options["partial"] = request.partial
    if table == SCALE:
        return make_scale(request.dataset, request.library, codebooks=request.codebooks, **options)
    return make_table(table, request.dataset, request.library, **options)


def _run(tables: Sequence[str], figures: Sequence[str], request: Request, say: Callable[[str], None]) -> None:
    """Train what is missing of everything asked for, as one sweep."""
    wanted: list[TrainConfig] = []
    for table in tables:
        wanted += configs(
            table,
            request.dataset,
            request.seeds,
            request.steps,
            batch_size=request.batch_size,
            data_path=request.data_path,
            codebooks=request.codebooks,
        )
    curves, models = _needs(figures, request)
    todo = _once([*missing([*wanted, *curves], request.library), *missing(models, Library([request.runs]))])
    number = len(_once([*wanted, *curves, *models]))
    if number:
        say(f"{number} runs are needed; {number - len(todo)} of them are done already")
    if todo and not request.quick and not torch.cuda.is_available():
        say("there is no GPU here: this takes hours a run (--quick makes a small version in minutes)")
    if todo:
        jobs = request.jobs or (min(os.cpu_count() or 1, MOST_QUICK_JOBS) if request.quick else None)
        with contextlib.redirect_stdout(sys.stderr):  # progress; another program may read what we make
            run_all(todo, request.runs, jobs=jobs)


def _once(wanted: Sequence[TrainConfig]) -> list[TrainConfig]:
    return list({config.run_id: config for config in wanted}.values())


def _needs(names: Sequence[str], request: Request) -> tuple[list[TrainConfig], list[TrainConfig]]:
    """The runs whose records, and those whose models the figures are drawn from."""
    if not names:
        return [], []
    from experiments.figures import FROM_RECORDS, needs

    options: dict[str, Any] = {"dataset": request.dataset, "steps": request.steps, "seeds": request.seeds}
    options |= {"batch_size": request.batch_size, "quick": request.quick, "data_path": request.data_path}
    curves = [config for name in names if name in FROM_RECORDS for config in needs(name, **options)]
    models = [config for name in names if name not in FROM_RECORDS for config in needs(name, **options)]
    return curves, models


def _draw(name: str, request: Request) -> list[Path]:
    from experiments.figures import draw

    return draw(
        name,
        request.runs,
        request.out,
        dataset=request.dataset,
        steps=request.steps,
        seeds=request.seeds,
        batch_size=request.batch_size,
        quick=request.quick,
        records=request.records,
        data_path=request.data_path,
        partial=request.partial,
    )


def _write(table: str, sheet: Sheet, out: Path) -> list[Path]:
    """The sheet's files: rows for programs, the table with its caption and, of the study `scale`, a picture."""
    texts = {out / f"{sheet.name}.csv": as_csv(sheet), out / f"{sheet.name}.md": markdown(sheet)}
    for path, text in texts.items():
        write_atomic(path, text.encode())
    if table != SCALE:
        return list(texts)
    from experiments.canvas import save
    from experiments.figure_scale import draw_scale

    return [*texts, *save(draw_scale(sheet), out, sheet.name)]
