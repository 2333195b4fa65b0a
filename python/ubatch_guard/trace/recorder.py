"""Records the steps of a serving worker as a trace, without ever holding up a step."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ubatch_guard.trace.format import BlockIds, TraceHeader, encode_line, step_object

DEFAULT_MAX_BYTES = 1 << 30
_QUEUE_STEPS = 1024


class StepRecorder:
    """Writes steps to a plain-text trace from a thread of its own.

    :meth:`record` neither blocks nor raises. It copies what it is given into a bounded queue; the thread
    encodes it and hands every line to the operating system at once, so that the trace of a killed worker can
    be read up to its last whole line. A trace with a hole could not be replayed, so recording ends for good
    with the first step that finds the queue full, does not fit into ``max_bytes`` any more, or cannot be
    written; that step and all later ones count as ``dropped``.

    Args:
        path: The file to create, plain text; an existing one is replaced.
        header: The trace's header.
        max_bytes: The file grows no larger.

    Raises:
        OSError: The file cannot be created.
        ValueError: Not even the header fits into ``max_bytes``.
    """

    def __init__(self, path: str | Path, header: TraceHeader, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        first_line = encode_line(header.to_json())
        if len(first_line) > max_bytes:
            raise ValueError(f"max_bytes is {max_bytes}; the header alone has {len(first_line)}")
        self.path = Path(path)
        self.recorded = 0
        """Steps in the file."""
        self.ended: str | None = None
        """Why recording has ended; None while it goes on."""
        self._max_bytes = max_bytes
        self._size = 0
        self._refused = 0  # Counted by the thread of the steps,
        self._lost = 0  # and by the writer's.
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._write(first_line)
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_QUEUE_STEPS)
        self._thread = threading.Thread(target=self._run, name="ubatch-guard-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def dropped(self) -> int:
        """Steps that are not in the file because recording had ended."""
        return self._refused + self._lost

    def record(
        self,
        finished: Iterable[str],
        preempted: Iterable[str],
        new: Iterable[tuple[str, int, BlockIds]],
        resumed: Iterable[tuple[str, int, BlockIds]],
        appended: Iterable[tuple[str, BlockIds]],
        batch: Iterable[tuple[str, int, int]],
        vllm_allows: bool,
    ) -> None:
        """Add a step.

        Args:
            finished: Ids whose rows go before the step.
            preempted: Ids whose rows go before the step, to be resumed later.
            new: ``(id, num_computed_tokens, block ids per group)`` of new requests.
            resumed: The same of requests that come back.
            appended: ``(id, block ids per group)`` added to rows.
            batch: ``(id, num_computed_tokens, num_scheduled_tokens)`` in batch order.
            vllm_allows: The engine's own verdict; True where it has none.
        """
        if self.ended is None:
            try:
                # Engines extend their block lists in place later on, so the ids are copied here and now.
                step = step_object(
                    finished,
                    preempted,
                    [(request_id, computed, _copied(rows)) for request_id, computed, rows in new],
                    [(request_id, computed, _copied(rows)) for request_id, computed, rows in resumed],
                    [(request_id, _copied(rows)) for request_id, rows in appended],
                    batch,
                    vllm_allows,
                )
                self._queue.put_nowait(step)
                return
            except queue.Full:
                self.ended = "the writer fell behind"
            except Exception as error:
                # A step of a serving worker must not fail because it cannot be recorded.
                self.ended = f"a step could not be taken: {error!r}"
        self._refused += 1

    def close(self, timeout: float = 10.0) -> None:
        """Write what is queued and close the file; waits at most ``timeout`` seconds, twice."""
        atexit.unregister(self.close)
        if self.ended is None:
            self.ended = "closed"
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                return
            self._thread.join(timeout)

    def _run(self) -> None:
        failed = False
        while (step := self._queue.get()) is not None:
            if not failed:
                try:
                    line = encode_line(step)
                    if self._size + len(line) > self._max_bytes:
                        raise OSError(f"the file would pass {self._max_bytes} bytes")
                    self._write(line)
                    self.recorded += 1
                except Exception as error:
                    failed = True
                    self.ended = f"a step could not be written: {error}"
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


def _copied(rows: BlockIds) -> list[list[int]]:
    return [row.tolist() if isinstance(row, np.ndarray) else list(row) for row in rows]
