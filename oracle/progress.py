"""A progress bar on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], None]  # done, in all, and what


@contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """A progress bar on stderr, where that is a terminal."""
    from oracle.report import console

    err = console(stderr=True)
    if not err.is_terminal:
        yield lambda done, total, what: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Bar(*columns, console=err, transient=True) as bar:
        task = bar.add_task(name, total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)
