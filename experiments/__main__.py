"""`python -m experiments NAME`: from the name of a table or figure to the runs it needs, to the table or figure."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from experiments.clients import table as clients
from experiments.figures.draw import draw
from experiments.figures.parts import FIGURES, FROM_RECORDS, TRACED, figures_of, needs
from experiments.figures.style import save
from experiments.paper.table import make_table
from experiments.prior import table as prior
from experiments.records import Records
from experiments.runs import missing, run_all, say_what_is_left
from experiments.scale.table import draw_scale, make_scale
from experiments.specs import CLIENTS, PRIOR, QUICK, SCALE, SETTINGS, TABLES, Options, configs, once, targets
from experiments.tables import FORMATS, Table, as_csv, markdown
from topovq.exits import one_line_errors
from topovq.storage import write_atomic
from topovq.tokenizer.models import check_name

EVERYTHING = "all"
STUDIES = {  # what runs, what makes the table, what draws it
    CLIENTS: (clients.run_missing, clients.make_clients, clients.draw_clients),
    PRIOR: (prior.run_missing, prior.make_prior_table, prior.draw_prior),
}
MOST_QUICK_JOBS = 4  # processes of the quick version: each takes seconds to start
PROGRAM = "python -m experiments"
DESCRIPTION = f"""Make a table or figure of the paper, ours beside theirs: train what is missing, then draw it.

Runs that were cut off are resumed, finished ones are skipped: the same command goes on after Ctrl-C.

  {PROGRAM} main --quick            two minutes on two cores: a small model, the embedded photographs
  {PROGRAM} main                    CIFAR-10, 10 seeds a cell, 30,000 steps: for a GPU
  {PROGRAM} main --render-only      from records alone: runs nothing
  {PROGRAM} main --dataset faces --data-path FACES --seeds 1 --steps 10000 --batch-size 32
  {PROGRAM} scale --codebooks 512 4096 --render-only --partial --format markdown

Tables of the paper: {", ".join(TABLES)}. Tables of our own: scale, a study of large codebooks; clients, a study of
quantizers in a modern tokenizer (its images lie in the folder --data-path, as imagenet160/*.tar and faces256/*.tar);
and prior, a study of models over tokens (its images lie there, too, CIFAR-10 among them).
`all` makes the paper's tables and figures. Figures:

""" + "\n".join(f"  {name:16}{text}" for name, text in FIGURES.items())


@dataclass(frozen=True, kw_only=True)
class Command(Options):
    name: Annotated[Positional[str], arg(metavar="NAME")]
    """Name of a table or of a figure, or all."""
    quick: bool = False
    """A small version on the photographs that come with the package, on the CPU."""

    def __post_init__(self) -> None:
        """Values are checked by `options`: a mistake is one line of ours there, and a box of tyro's here."""

    def options(self) -> Options:
        values = {field.name: getattr(self, field.name) for field in fields(Options)}
        return Options(**values | ({"dataset": QUICK} if self.quick else {}))


def make(
    name: str, options: Options, say: Callable[[str], None] = print, show: Callable[[str], object] = print
) -> list[Path]:
    """Run what is missing for a table, a figure, or "all", then make it; the files it wrote.

    `say` is told how things go, `show` gets each table in the format asked for.
    """
    check_name("table or figure", name, (*TABLES, SCALE, *STUDIES, *FIGURES, EVERYTHING))
    if name in STUDIES:
        return make_study(name, options, say, show)
    tables = tables_of(options.dataset) if name == EVERYTHING else [name] if name not in FIGURES else []
    figures = figures_of(options.dataset) if name == EVERYTHING else [name] if name in FIGURES else []
    if options.codebooks is not None and figures:
        raise ValueError(f"codebooks={list(options.codebooks)} goes with {SCALE!r}, not with {name!r}")
    if not options.render_only:
        train_missing(tables, figures, options, say)
    records = Records([options.runs, *options.records])
    written = []
    for each in tables:
        table = make_scale(options, records) if each == SCALE else make_table(each, options, records)
        show(FORMATS[options.format](table))
        written += write(table, options.out)
        if each == SCALE:
            written += save(draw_scale(table), options.out, table.name)
    left_out = []
    for each in figures:
        try:
            written += draw(each, options)
        except FileNotFoundError:  # of a model or a run, since nothing is to be run
            if name != EVERYTHING or not (options.render_only or each in TRACED) or each in FROM_RECORDS:
                raise
            left_out.append(each)
    if left_out:
        say(f"not drawn, since their models or runs are not in {options.runs}: {', '.join(left_out)}")
    return written


def make_study(name: str, options: Options, say: Callable[[str], None], show: Callable[[str], object]) -> list[Path]:
    """`make` of a study whose runs are not those of the trainer. Its records lie in a folder of its name, if there is
    one: beside it may lie others of the same cells, from before the code was what it is."""
    run_missing, make_study_table, draw_study = STUDIES[name]
    own = (own if (own := folder / name).is_dir() else folder for folder in options.records)
    options = replace(options, records=tuple(own))
    if not options.render_only:
        run_missing(options, say)
    table = make_study_table(options)
    show(FORMATS[options.format](prior.asked(table) if name == PRIOR and options.format == "csv" else table))
    figure = draw_study(table)
    return [*write(table, options.out), *(save(figure, options.out, table.name) if figure else [])]


def tables_of(dataset: str) -> list[str]:
    """The paper's tables that have rows for a data set."""
    shown = {key[0] for key in targets() if key[1] == ("cifar10" if dataset == QUICK else dataset)}
    return [table for table in TABLES if table in shown]


def train_missing(
    tables: Sequence[str], figures: Sequence[str], options: Options, say: Callable[[str], None] = print
) -> None:
    """Train what is missing of everything asked for, as one sweep."""
    told = [config for table in tables for config in configs(table, options)]
    told += [config for name in figures if name in FROM_RECORDS for config in needs(name, options)]
    models = [config for name in figures if name not in FROM_RECORDS for config in needs(name, options)]
    everywhere, here = Records([options.runs, *options.records]), Records([options.runs])
    todo = once([*missing(told, everywhere), *missing(models, here)])
    number = len(once([*told, *models]))
    quick = SETTINGS[options.dataset].device == "cpu"
    if number:
        say_what_is_left(number, len(todo), quick, say)
    if todo:
        jobs = options.jobs or (min(os.cpu_count() or 1, MOST_QUICK_JOBS) if quick else None)
        with contextlib.redirect_stdout(sys.stderr):  # progress; another program may read what we make
            run_all(todo, options.runs, jobs=jobs)


def write(table: Table, out: Path) -> list[Path]:
    """The table's files: rows for programs, and the table with its caption."""
    texts = {out / f"{table.name}.csv": as_csv(table), out / f"{table.name}.md": markdown(table)}
    for path, text in texts.items():
        write_atomic(path, text.encode())
    return list(texts)


def remark(text: str) -> None:
    """Beside the output, which another program may read."""
    Console(stderr=True, highlight=False).print(text, soft_wrap=True, markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; mistakes end as those of `topovq` do."""
    with one_line_errors(PROGRAM):
        command = tyro.cli(Command, prog=PROGRAM, description=DESCRIPTION, args=arguments)
        written = make(command.name, command.options(), say=remark, show=sys.stdout.write)
        remark("written: " + ", ".join(map(str, written)))


if __name__ == "__main__":
    main()
