"""Records the steps of a serving worker as a trace, without ever holding up a step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import queue
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ubatch_guard.log import described, say
from ubatch_guard.settings import unknown_placeholder
from ubatch_guard.trace.format import TraceHeader
from ubatch_guard.trace.lines import check_line
from ubatch_guard.trace.records import Admission, Appended, Changes, StepRecord
from ubatch_guard.trace.writer import encode_line, step_object

DEFAULT_MAX_BYTES = 1 << 30
_QUEUE_STEPS = 1024
_MOST_SERIALS = 10_000
_NAMES_KEPT = 1 << 14
_CLOSED = "closed"


class StepRecorder:
    """Writes steps to a plain-text trace from a thread of its own.

    :meth:`record` neither blocks nor raises. It copies what it is given into a bounded queue; the thread
    encodes it and hands every line to the operating system at once, so that the trace of a killed worker can
    be read up to its last whole line. A trace with a hole could not be replayed, so recording ends for good
    with the first step that finds the queue full, does not fit into ``max_bytes`` any more, or cannot be
    written; that step and all later ones count as ``dropped``. The end is logged once, with its reason.

    What is written can be read: ids that have no rows are left out of ``finished`` and ``preempted``, and an
    id that is no text is written as one.

    Args:
        path: The file to create, plain text, for its owner alone (mode 0600). A name that is taken, be it by
            a link or a pipe, is an error: nothing is ever overwritten.
        header: The trace's header.
        max_bytes: The file grows no larger.
        hash_ids: Write keyed hashes for the request ids. The key is drawn for this trace and kept nowhere.

    Raises:
        OSError: The file cannot be created.
        ValueError: Not even the header fits into ``max_bytes``, or no reader would take it.
    """

    def __init__(
        self,
        path: str | Path,
        header: TraceHeader,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        hash_ids: bool = False,
    ) -> None:
        first_line = encode_line(header.to_json())
        if len(first_line) > max_bytes:
            raise ValueError(f"max_bytes is {max_bytes}; the header alone has {len(first_line)}")
        TraceHeader.from_json(header.to_json())
        self.path = Path(path)
        self.recorded = 0
        """Steps in the file."""
        self.ended: str | None = None
        """Why recording has ended; None while it goes on."""
        self._ending = threading.Lock()
        self._max_bytes = max_bytes
        self._size = 0
        self._refused = 0  # Counted by the thread of the steps,
        self._lost = 0  # and by the writer's.
        self._steps = _ReadableSteps(header.version, secrets.token_bytes(16) if hash_ids else None)
        # O_EXCL follows no link and opens nothing that is there.
        self._file = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            self._write(first_line)
        except OSError:
            os.close(self._file)
            raise
        self._queue: queue.Queue[StepRecord | None] = queue.Queue(_QUEUE_STEPS)
        self._thread = threading.Thread(target=self._run, name="ubatch-guard-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def create(
        cls,
        pattern: str,
        rank: str,
        header: TraceHeader,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        hash_ids: bool = False,
    ) -> StepRecorder:
        """A recorder with a file of its own: the first free one of :func:`trace_path`.

        Raises:
            OSError: The file cannot be created.
            ValueError: As for the class, or the pattern has an unknown placeholder.
        """
        for serial in range(_MOST_SERIALS):
            path = trace_path(pattern, rank, serial)
            with contextlib.suppress(FileExistsError):
                return cls(path, header, max_bytes=max_bytes, hash_ids=hash_ids)
        raise FileExistsError(f"{path} and {serial} others are taken")

    @property
    def open(self) -> bool:
        """Whether a step would still be recorded; once False, False for good."""
        return self.ended is None

    @property
    def dropped(self) -> int:
        """Steps that are not in the file because recording had ended."""
        return self._refused + self._lost

    def record(self, step: StepRecord) -> None:
        """Add a step. Its lists and arrays may change once this returns."""
        if self.ended is None:
            try:
                if not self._thread.is_alive():
                    raise RuntimeError("the writer does not run in this process")
                self._queue.put_nowait(step.copied())
                return
            except queue.Full:
                self._end("the writer fell behind")
            except Exception as error:
                # A step of a serving worker must not fail because it cannot be recorded.
                self._end(f"a step could not be taken: {described(error)}")
        self._refused += 1

    def close(self, timeout: float = 10.0) -> None:
        """Write what is queued and close the file; waits at most ``timeout`` seconds, twice."""
        atexit.unregister(self.close)
        with self._ending:
            self.ended = self.ended or _CLOSED
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                return
            self._thread.join(timeout)

    def _end(self, reason: str) -> None:
        with self._ending:
            # What goes wrong with the last steps of a closed trace is still worth a line.
            if self.ended not in (None, _CLOSED):
                return
            self.ended = reason
        say(f"ubatch-guard: the trace {self.path} ends: {reason}")

    def _run(self) -> None:
        failed = False
        while (step := self._queue.get()) is not None:
            if not failed:
                try:
                    line = encode_line(self._steps.line(step))
                    check_line(line)
                    if self._size + len(line) > self._max_bytes:
                        raise OSError(f"the file would pass {self._max_bytes} bytes")
                    self._write(line)
                    self.recorded += 1
                except Exception as error:
                    failed = True
                    self._end(f"a step could not be written: {described(error)}")
            if failed:
                self._lost += 1
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        """Append a line; on failure take away what got there of it."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)


class _ReadableSteps:
    """Makes step lines that a reader takes out of whatever ids an engine has.

    Args:
        version: Of the format.
        key: Of the hash of request ids; None: they are written as they are.
    """

    def __init__(self, version: int, key: bytes | None) -> None:
        self._version = version
        # The same ids come in every step.
        self._name = functools.lru_cache(_NAMES_KEPT)(functools.partial(_text_of, key=key))
        self._has_rows: dict[str, bool] = {}
        """The ids that are not finished; False: preempted."""

    def line(self, step: StepRecord) -> dict[str, Any]:
        """The line of a step, as an object.

        Raises:
            ValueError: The step has a request whose rows the trace does not know.
        """
        known, changes = self._has_rows, step.changes
        finished = [name for name in self._names(changes.finished) if name in known]
        preempted = [name for name in self._names(changes.preempted) if known.get(name)]
        known.update(dict.fromkeys(preempted, False))
        for name in finished:
            del known[name]
        new = self._admissions(changes.new)
        resumed: list[Admission] = []
        for entry in self._admissions(changes.resumed):
            (resumed if entry.request_id in known else new).append(entry)
        known.update((entry.request_id, True) for entry in (*new, *resumed))
        readable = StepRecord(
            Changes(
                finished,
                preempted,
                new,
                resumed,
                Appended(self._live(changes.appended.request_ids), changes.appended.rows),
                self._live(changes.set_back),
            ),
            self._live(step.request_ids),
            step.num_computed_tokens,
            step.num_scheduled_tokens,
            step.vllm_allows,
            step.cuts,
            step.ranks_agreed,
        )
        return step_object(readable, self._version)

    def _admissions(self, entries: Sequence[Admission]) -> list[Admission]:
        return [
            Admission(self._name(entry.request_id), entry.num_computed_tokens, entry.rows)
            for entry in entries
        ]

    def _live(self, request_ids: Sequence[object]) -> list[str]:
        names = self._names(request_ids)
        for name in names:
            if not self._has_rows.get(name):
                raise ValueError(f"request {name!r} has no rows in this trace")
        return names

    def _names(self, request_ids: Sequence[object]) -> list[str]:
        return [self._name(request_id) for request_id in request_ids]


def _text_of(request_id: object, key: bytes | None) -> str:
    """A request id as Unicode text, hashed under a key if there is one."""
    text = str(request_id) if isinstance(request_id, str) else f"{type(request_id).__name__} {request_id!a}"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            text = f"str {text!a}"
    return text if key is None else hashlib.blake2b(text.encode(), digest_size=16, key=key).hexdigest()


def trace_path(pattern: str, rank: str, serial: int = 0) -> Path:
    """A worker's trace file after a pattern.

    ``{rank}`` and ``{pid}`` are filled in; ``{pid}`` goes before the suffixes of a file name that has none. A
    ``serial`` above 0 follows the process id, for a further runner of the process or a process that got the
    id again.

    Raises:
        ValueError: The pattern has another placeholder, or ``rank`` a path separator.
    """
    unknown = unknown_placeholder(pattern)
    if unknown is not None:
        raise ValueError(f"unknown placeholder {unknown} in {pattern!r}; known are {{pid}} and {{rank}}")
    if "/" in rank or "\0" in rank:
        raise ValueError(f"rank {rank!r} cannot be part of a file name")
    folder, separator, name = pattern.rpartition("/")
    if "{pid}" in name:
        stem, _, rest = name.partition("{pid}")
        before, after = f"{stem}{{pid}}", rest
    else:
        stem, dot, suffixes = name.partition(".")
        before, after = f"{stem}.{{pid}}", f"{dot}{suffixes}"
    number = f"-{serial}" if serial else ""
    filled = f"{folder}{separator}{before}{number}{after}"
    return Path(filled.replace("{pid}", str(os.getpid())).replace("{rank}", rank))
