"""A progress bar over the bytes of a file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from ubatch_guard.report.answer import printable

_PROGRESS_STEPS = 16


@contextlib.contextmanager
def progress(path: str, *, shown: bool = True) -> Iterator[Callable[[Callable[[], int]], None] | None]:
    """A progress bar, where standard error is a terminal and rich is there; otherwise None.

    Args:
        path: The file.
        shown: Whether a bar is wanted at all.

    Returns:
        To be called after each step, with a function that says how many bytes of the file are read.
    """
    if not shown or not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        yield None
        return
    size = os.path.getsize(path) if os.path.isfile(path) else None
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(os.path.basename(path)), total=size)
        steps = 0

        def on_step(tell: Callable[[], int]) -> None:
            nonlocal steps
            steps += 1
            if steps % _PROGRESS_STEPS == 0:
                bar.update(task, completed=tell())

        yield on_step
