"""The pictures that ``audit`` and ``simulate`` draw: ``--report`` and ``--perfetto``."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ubatch_guard.report.picture import MAX_OPENED, TracePicture
from ubatch_guard.step import Policy
from ubatch_guard.trace.audit import AuditedStep, TraceAudit

if TYPE_CHECKING:
    from ubatch_guard.report.page import TraceReport

_FULL_TRACES = 8
"""With more traces, fewer steps of each are opened, so that a page stays at some tens of megabytes."""


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--report", metavar="FILE.html", help="draw it: one page that a browser opens without a network"
    )
    parser.add_argument(
        "--perfetto", metavar="FILE.json", help="write the steps for ui.perfetto.dev (.gz is compressed)"
    )


def refuse_overwriting(args: argparse.Namespace, inputs: Iterable[str]) -> None:
    """Leave with a usage error if what is written is what is read, or two outputs are the same file."""
    kept = getattr(args, "trace", None)
    outputs = {"--report": args.report, "--perfetto": args.perfetto, "--trace": kept}
    taken = {os.path.realpath(path): path for path in inputs}
    for option, path in outputs.items():
        if path is None:
            continue
        real = os.path.realpath(path)
        if real in taken:
            args.usage(f"{option} would overwrite {taken[real]}")
        taken[real] = f"the file of {option}"


class NotWrittenError(Exception):
    """A picture cannot be written; the message says which and why."""


class Pictures:
    """What is drawn of the traces of one command.

    Each trace is begun, its steps are added, and it ends with `audited`; one that cannot be read just ends.
    All raise `NotWrittenError`.
    """

    def __init__(self, page: _Page | None, perfetto: _Perfetto | None, most_opened: int) -> None:
        self._page = page
        self._perfetto = perfetto
        self._most_opened = most_opened
        self._picture = TracePicture()

    def begin(self, name: str) -> None:
        """The next steps are those of another trace."""
        self._picture = TracePicture(self._most_opened)
        if self._perfetto is not None:
            self._perfetto.begin(name)

    def add(self, step: AuditedStep) -> None:
        """Take in a step, which follows on the ones before."""
        if self._page is not None:
            self._picture.add(step)
        if self._perfetto is not None:
            self._perfetto.add(step)

    def audited(self, audit: TraceAudit) -> None:
        """The trace has ended."""
        if self._page is not None:
            self._page.add(audit, self._picture)


class _Page:
    def __init__(self, path: str, policy: Policy) -> None:
        # Loads plotly, which may not be there.
        from ubatch_guard.report import page

        self._write, self._report = page.write_report, page.TraceReport
        self._path = path
        self._policy = policy
        self._reports: list[TraceReport] = []
        # A wrong path costs no audit; what is there stays until the page is whole.
        with _writing(path), open(path, "a"):
            pass

    def add(self, audit: TraceAudit, picture: TracePicture) -> None:
        self._reports.append(self._report(audit, picture))

    def finish(self) -> None:
        if self._reports:
            with _writing(self._path), open(self._path, "w", encoding="utf-8") as file:
                self._write(file, self._reports, self._policy)


class _Perfetto:
    def __init__(self, path: str) -> None:
        from ubatch_guard.report.perfetto import PerfettoTrace

        self._path = path
        with _writing(path):
            self._trace = PerfettoTrace(path)

    def begin(self, name: str) -> None:
        with _writing(self._path):
            self._trace.begin(name)

    def add(self, step: AuditedStep) -> None:
        with _writing(self._path):
            self._trace.add(step)

    def close(self) -> None:
        with _writing(self._path):
            self._trace.close()


@contextlib.contextmanager
def pictures(args: argparse.Namespace, traces: int) -> Iterator[Pictures | None]:
    """What the arguments ask for; None: nothing.

    Args:
        args: As parsed.
        traces: Number of traces.

    Raises:
        NotWrittenError: A file cannot be written.
    """
    if args.report is None and args.perfetto is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        page = None if args.report is None else _Page(args.report, Policy(args.policy))
        perfetto = None
        if args.perfetto is not None:
            perfetto = _Perfetto(args.perfetto)
            stack.callback(perfetto.close)
        yield Pictures(
            page, perfetto, max(2, MAX_OPENED * _FULL_TRACES // max(traces, _FULL_TRACES) // 2 * 2)
        )
        if page is not None:
            page.finish()


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotWrittenError(f"{path}: {error.strerror or error}") from error
