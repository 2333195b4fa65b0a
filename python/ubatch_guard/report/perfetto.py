"""An audit as a trace that Perfetto opens: microbatches as tracks, hazards as flows.

The format is Chrome's: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
A token of a step lasts a microsecond there, and the steps come one after the other: a trace has no times.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from ubatch_guard.report.answer import printable
from ubatch_guard.report.picture import KINDS, kind_of, microbatches
from ubatch_guard.step import UnsafeCuts
from ubatch_guard.trace.audit import AuditedStep

_STEPS = 0
"""The track of the whole steps; those of the microbatches count from 1."""

Event = dict[str, Any]


class PerfettoTrace:
    """Writes audited steps as they come.

    Each trace becomes two processes: without a guard, and with this one. A step that is unsafe at one of the
    engine's cuts shows its requests, and a flow for each pair of culprits: without a guard from the one that
    reads to the one that writes too late; with it, if the step is reordered, from the writer to the reader.

    Args:
        path: The file; ``.gz`` at its end compresses it.

    Raises:
        OSError: It cannot be opened, or later, written.
    """

    def __init__(self, path: str) -> None:
        self._file: TextIO
        if path.endswith(".gz"):
            compressed = gzip.open(path, "wb", compresslevel=3)  # noqa: SIM115 - closed by close()
            self._file = io.TextIOWrapper(compressed, encoding="utf-8")
        else:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        self._first = True
        self._flows = 0
        self._processes = 0
        self._named: set[tuple[int, int]] = set()
        self._offset = 0

    def close(self) -> None:
        """End the file."""
        with self._file:
            self._file.write("\n]}\n")

    def begin(self, name: str) -> None:
        """The next steps are those of another trace."""
        self._processes += 2
        self._offset = 0
        for process, guard in ((self._without, "without a guard"), (self._with, "with ubatch-guard")):
            self._write(_named("process_name", process, 0, f"{printable(name)}: {guard}"))
            self._write(
                {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
            )

    def add(self, step: AuditedStep) -> None:
        """Take in a step, which follows on the ones before."""
        kind = KINDS[kind_of(step.verdict)]
        permutation: Sequence[int] = range(len(step.record.request_ids))
        self._step(self._without, step, "small" if kind == "small" else "split", permutation)
        if step.verdict is not None and step.verdict.order is not None:
            permutation = step.verdict.order.permutation
        self._step(self._with, step, kind, permutation)
        self._offset += step.record.num_tokens

    @property
    def _without(self) -> int:
        return self._processes - 1

    @property
    def _with(self) -> int:
        return self._processes

    def _step(self, process: int, step: AuditedStep, kind: str, permutation: Sequence[int]) -> None:
        record, tokens = step.record, step.record.num_tokens
        split = kind in ("split", "reordered")
        unsafe = kind == "split" and step.hazardous
        figures = {"line": step.line, "tokens": tokens, "requests": len(record.request_ids)}
        name = f"{kind}, unsafe" if unsafe else kind
        self._slice(process, _STEPS, name, 0, tokens, figures)
        parts = list(microbatches(step.cuts if split else (), tokens))
        for track, (first, end) in enumerate(parts, 1):
            self._slice(process, track, f"microbatch {track}" if split else "whole", first, end)
        if not step.hazardous or step.verdict is None:
            return
        firsts: dict[int, int] = {}
        first = 0
        for position in permutation:
            firsts[position] = first
            end = first + int(record.num_scheduled_tokens[position])
            for track, start, stop in _pieces(first, end, parts):
                self._slice(
                    process,
                    track,
                    printable(record.request_ids[position]),
                    start,
                    stop,
                    {"num_computed_tokens": int(record.num_computed_tokens[position])},
                )
            first = end
        for cuts in step.verdict.unsafe:
            if unsafe and _broken(cuts, step.cuts):
                self._flow(process, "reads before it is written", cuts.reader, cuts.writer, firsts, parts)
            elif kind == "reordered":
                self._flow(process, "is read after it", cuts.writer, cuts.reader, firsts, parts)

    def _flow(
        self,
        process: int,
        name: str,
        source: int,
        target: int,
        firsts: dict[int, int],
        parts: Sequence[tuple[int, int]],
    ) -> None:
        self._flows += 1
        for phase, position in (("s", source), ("f", target)):
            at = firsts[position]
            track = next(track for track, (first, end) in enumerate(parts, 1) if first <= at < end)
            event: Event = {"ph": phase, "cat": "hazard", "name": name, "id": self._flows}
            if phase == "f":
                event["bp"] = "e"  # to the slice it is in, not to the next one
            self._write({**event, "pid": process, "tid": track, "ts": self._offset + at})

    def _slice(
        self, process: int, track: int, name: str, first: int, end: int, figures: Event | None = None
    ) -> None:
        if (process, track) not in self._named:
            self._named.add((process, track))
            self._write(_named("thread_name", process, track, f"microbatch {track}" if track else "steps"))
        event: Event = {"ph": "X", "name": name, "pid": process, "tid": track}
        event |= {"ts": self._offset + first, "dur": end - first}
        self._write(event if figures is None else {**event, "args": figures})

    def _write(self, event: Event) -> None:
        if not self._first:
            self._file.write(",\n")
        self._first = False
        json.dump(event, self._file, separators=(",", ":"))


def _named(kind: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _pieces(first: int, end: int, parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """The track, first and end of a request's tokens in each microbatch."""
    for track, (start, stop) in enumerate(parts, 1):
        if first < stop and start < end:
            yield track, max(first, start), min(end, stop)


def _broken(cuts: UnsafeCuts, engine_cuts: Sequence[int]) -> bool:
    return any(cuts.first <= cut <= cuts.last for cut in engine_cuts)
