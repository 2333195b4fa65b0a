"""Writes traces: the lines of header and steps, and a file of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ubatch_guard.trace.format import TraceHeader
from ubatch_guard.trace.lines import create
from ubatch_guard.trace.records import Admission, StepRecord


class TraceWriter:
    """Writes a trace, compressed after its name: ``.gz`` with gzip, ``.zst`` with zstd, others not.

    Raises:
        OSError: The file cannot be written.
        ModuleNotFoundError: zstd without the ``zstandard`` package (extra ``cli``).
    """

    def __init__(self, path: str | Path, header: TraceHeader) -> None:
        self._version = header.version
        self._file = create(Path(path))
        self._file.write(encode_line(header.to_json()))

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: StepRecord) -> None:
        """Add a step; what version 1 cannot say is left out of a trace of version 1."""
        self._file.write(encode_line(step_object(record, self._version)))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


def step_object(record: StepRecord, version: int) -> dict[str, Any]:
    """A step line as an object; what is in it may still be numpy's."""
    changes, appended = record.changes, record.changes.appended
    line = {
        "finished": list(changes.finished),
        "preempted": list(changes.preempted),
        "new": _admissions(changes.new),
        "resumed": _admissions(changes.resumed),
        "appended": [
            (request_id, rows)
            for request_id, rows in zip(appended.request_ids, appended.rows, strict=True)
            if rows is not None
        ],
        "batch": list(
            zip(
                record.request_ids,
                _plain(record.num_computed_tokens),
                _plain(record.num_scheduled_tokens),
                strict=True,
            )
        ),
        "vllm_allows": record.vllm_allows,
    }
    if version > 1:
        if changes.set_back:
            line["set_back"] = list(changes.set_back)
        line["cuts"] = None if record.cuts is None else list(record.cuts)
        line["ranks_agreed"] = record.ranks_agreed
    return line


def encode_line(value: Mapping[str, Any]) -> bytes:
    """A line of a trace, with its line feed."""
    return json.dumps(value, separators=(",", ":"), default=_plain).encode("ascii") + b"\n"


def _admissions(entries: Iterable[Admission]) -> list[tuple[str, int, Sequence[Any]]]:
    return [(entry.request_id, entry.num_computed_tokens, entry.rows) for entry in entries]


def _plain(value: object) -> Any:
    """Numpy's scalars and arrays as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in a trace")
