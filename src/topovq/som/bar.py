"""A progress bar over the rows of all passes: rows a second, and the time that is left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from topovq.som.passes import Passes


class RowsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / task.elapsed:,.0f} rows/s" if task.completed and task.elapsed else "")


@contextlib.contextmanager
def bar(passes: Passes, count: int, title: str, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that changes the title; the bar moves with each block of the `count` passes there will be."""
    if not shown:
        yield lambda title: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        RowsPerSecond(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, speed_estimate_period=120) as progress:
        task = progress.add_task(title, total=None)

        def advance(rows: int) -> None:  # how many there are may be known after the first pass alone
            progress.update(task, advance=rows, total=passes.n and passes.n * count)

        passes.advance = advance  # type: ignore[method-assign]
        try:
            yield lambda title: progress.update(task, description=title)
            progress.update(task, total=progress.tasks[0].completed)  # fewer passes, where `tol` said so
        finally:
            del passes.advance
