"""Reads traces, a line at a time."""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ubatch_guard.trace.format import MalformedError, TraceError, TraceHeader, one_line, short
from ubatch_guard.trace.lines import BrokenOffError, Source, UnreadableError, check_line, split_lines
from ubatch_guard.trace.parser import StepParser
from ubatch_guard.trace.records import StepRecord

REQUEST_KEYS = frozenset({"input_length", "hash_ids", "prompt", "prompt_token_ids", "messages"})
"""By one of them a line of a request log is told from a trace's header."""


class TraceReader:
    """Reads a trace, a step at a time.

    ``with TraceReader(path) as trace:`` gives ``trace.header``; iterating gives
    :class:`~ubatch_guard.trace.records.StepRecord` with int32 rows and tuples. Ids and block ids are checked
    against the steps before: a record that comes out can be replayed.

    Args:
        path: Plain text, gzip or zstd (by its first bytes, whatever its name); a pipe does too.
        partial: Stop at the last whole line of a trace that breaks off, as that of a killed process does,
            instead of raising.

    Raises:
        TraceError: On construction and while iterating.
    """

    def __init__(self, path: str | Path, *, partial: bool = False) -> None:
        self.path = str(path)
        self.line = 0
        """Number of the line read last, from 1."""
        self._partial = partial
        try:
            self._file = Path(path).open("rb")  # noqa: SIM115 - closed by close()
        except (OSError, ValueError) as error:
            # A path with a null byte is a ValueError.
            raise self._error(getattr(error, "strerror", None) or one_line(error)) from error
        try:
            self._source = self._open_source()
            self._lines = self._read_lines()
            self.header = self._parse_header()
            self._parser = StepParser(self.header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
        self._file.close()

    def tell(self) -> int:
        """Bytes of the file read so far, compressed as they stand there."""
        return self._source.position

    def __iter__(self) -> Iterator[StepRecord]:
        for line in self._lines:
            try:
                record = self._parser.parse(line)
            except MalformedError as error:
                raise self._error(str(error)) from error
            yield record

    def _error(self, reason: str) -> TraceError:
        return TraceError(self.path, self.line, reason)

    def _open_source(self) -> Source:
        try:
            return Source(self._file)
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error

    def _read_lines(self) -> Generator[dict[str, Any], None, None]:
        """The lines as JSON objects."""
        lines = split_lines(self._source)
        while True:
            self.line += 1
            try:
                text, whole = next(lines)
                check_line(text)
            except StopIteration:
                self.line -= 1
                return
            except UnreadableError as error:
                if isinstance(error, BrokenOffError) and self._partial and self.line > 1:
                    self.line -= 1
                    return
                raise self._error(str(error)) from error
            except OSError as error:
                raise self._error(error.strerror or str(error)) from error
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                if not whole and self._partial and self.line > 1:
                    self.line -= 1
                    return
                what = "not JSON" if whole else "the file breaks off in the middle of the line"
                raise self._error(f"{what}: {one_line(error)}") from error
            if not isinstance(value, dict):
                raise self._error(f"not a JSON object: {short(value)}")
            yield value

    def _parse_header(self) -> TraceHeader:
        line = next(self._lines, None)
        if line is None:
            self.line = 1
            raise self._error("no header line")
        if REQUEST_KEYS & line.keys() and "format" not in line:
            raise self._error(
                f"a log of requests, not of steps; try: ubatch-guard simulate {shlex.quote(self.path)}"
            )
        try:
            return TraceHeader.from_json(line)
        except MalformedError as error:
            raise self._error(str(error)) from error
