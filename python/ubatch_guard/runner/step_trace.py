"""The step trace of one runner: opened with its first vote, ended for good by whatever goes wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ubatch_guard.counters import Counters
from ubatch_guard.runner.batch import Batch
from ubatch_guard.runner.report import Report
from ubatch_guard.settings import Settings
from ubatch_guard.step import KVCacheGroup
from ubatch_guard.trace.format import TraceHeader
from ubatch_guard.trace.recorder import StepRecorder


@dataclass(slots=True)
class _Deltas:
    finished: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    new: list[tuple[str, int, list[list[int]]]] = field(default_factory=list)
    resumed: list[tuple[str, int, list[list[int]]]] = field(default_factory=list)
    appended: list[tuple[str, list[list[int]]]] = field(default_factory=list)


class StepTrace:
    """Records the steps of a runner, if the settings ask for it; never raises."""

    def __init__(self, settings: Settings, name: str, report: Report, counters: Counters) -> None:
        self.recorder: StepRecorder | None = None
        self.on = settings.trace is not None
        self._settings = settings
        self._name = name
        self._report = report
        self._deltas = _Deltas()
        self._known: set[str] = set()

    def note(self, scheduler_output: Any, groups: Any) -> None:
        def copied(rows: Any) -> list[list[int]]:
            return [list(row) for row in groups.rows(rows)]

        deltas, cached = self._deltas, scheduler_output.scheduled_cached_reqs
        deltas.finished += [r for r in scheduler_output.finished_req_ids if r in self._known]
        self._known -= scheduler_output.finished_req_ids
        preempted = getattr(scheduler_output, "preempted_req_ids", None) or ()
        deltas.preempted += [r for r in preempted if r in self._known]
        self._known -= set(preempted)
        deltas.new += [
            (request.req_id, request.num_computed_tokens, copied(request.block_ids))
            for request in scheduler_output.scheduled_new_reqs
        ]
        self._known |= {request.req_id for request in scheduler_output.scheduled_new_reqs}
        resumed = getattr(cached, "resumed_req_ids", None) or ()
        for req_id, computed, rows in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if rows is None:
                continue
            if req_id in resumed:
                deltas.resumed.append((req_id, computed, copied(rows)))
                self._known.add(req_id)
            else:
                deltas.appended.append((req_id, copied(rows)))

    def record(self, batch: Batch, groups: Sequence[KVCacheGroup], theirs: bool | None) -> None:
        deltas, self._deltas = self._deltas, _Deltas()
        try:
            if self.recorder is None:
                header = TraceHeader(
                    block_sizes=tuple(group.tokens_per_column for group in groups),
                    sliding_windows=tuple(group.sliding_window for group in groups),
                    attention_chunk_sizes=tuple(group.attention_chunk_size for group in groups),
                    num_blocks=max((group.num_blocks for group in groups), default=0),
                    decode_threshold=batch.decode_threshold or 1,
                    num_ubatches=batch.num_ubatches,
                    source="ubatch-guard",
                )
                assert self._settings.trace is not None
                self.recorder = StepRecorder(
                    trace_path(self._settings.trace, self._name),
                    header,
                    max_bytes=self._settings.trace_max_bytes,
                )
        except Exception as error:
            self.on = False
            self._report.once("trace", f"no trace is written ({error})")
            return
        self.recorder.record(
            deltas.finished,
            deltas.preempted,
            deltas.new,
            deltas.resumed,
            deltas.appended,
            zip(
                batch.req_ids,
                batch.num_computed_tokens.tolist(),
                batch.num_scheduled_tokens.tolist(),
                strict=True,
            ),
            theirs is not False,
        )

    def end(self, why: str) -> None:
        """A trace with a hole could not be replayed."""
        if self.on:
            self.on = False
            self._report.once("trace", f"the trace ends here: {why}")
            if self.recorder is not None:
                self.recorder.close(timeout=0.0)


def trace_path(pattern: str, rank: str) -> Path:
    """Fill ``{pid}`` and ``{rank}`` into a trace pattern; a missing ``{pid}`` goes before its suffixes."""
    path = Path(pattern if "{pid}" in pattern else _with_pid(pattern))
    return Path(str(path).replace("{pid}", str(os.getpid())).replace("{rank}", rank))


def _with_pid(pattern: str) -> str:
    folder, separator, name = pattern.rpartition("/")
    stem, dot, suffixes = name.partition(".")
    return f"{folder}{separator}{stem}.{{pid}}{dot}{suffixes}"
