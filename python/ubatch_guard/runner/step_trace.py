"""The step trace of one runner: opened with its first vote, ended for good by whatever goes wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ubatch_guard.counters import Counters
from ubatch_guard.log import described
from ubatch_guard.runner.batch import Batch
from ubatch_guard.runner.report import Report
from ubatch_guard.settings import Settings
from ubatch_guard.step import KVCacheGroup
from ubatch_guard.trace.format import TraceHeader
from ubatch_guard.trace.recorder import StepRecorder
from ubatch_guard.trace.records import Changes, StepRecord

_NONE = np.zeros(0, np.int32)


class StepTrace:
    """Records the steps of a runner, if the settings ask for it. Never raises: a trace costs no step.

    Args:
        settings: Say whether, and where.
        name: Of the worker, for the file's name.
        report: Is told, once, that a trace ends.
        counters: Count that it does.

    Attributes:
        on: Steps are recorded.
        recorder: None: nothing was recorded yet.
    """

    def __init__(self, settings: Settings, name: str, report: Report, counters: Counters) -> None:
        self.on = settings.trace is not None
        self.recorder: StepRecorder | None = None
        self._settings = settings
        self._name = name
        self._report = report
        self._counters = counters
        self._changes: list[Changes] = []
        """Of the steps since the last one that was recorded; all but the last were not voted on."""
        self._held: StepRecord | None = None
        """Voted on, and not settled yet."""

    def note(self, changes: Changes) -> None:
        """Keep what became of the rows before the step under way."""
        self.settle(None, None)
        self._changes.append(changes)

    def record(
        self,
        batch: Batch,
        groups: Sequence[KVCacheGroup],
        engine_allows: bool | None,
        set_back: Sequence[str],
    ) -> None:
        """Record a step that was voted on, as soon as it is known what the ranks settled on.

        Args:
            batch: The step in its final order.
            groups: The KV cache groups that rows are recorded of.
            engine_allows: The engine's own verdict; None: it was not asked.
            set_back: Running requests that a failed KV load has set back.
        """
        try:
            if self.recorder is None:
                self.recorder = self._open(batch, groups)
            *before, changes = self._changes
            self._changes = []
            for unasked in before:
                self.recorder.record(StepRecord(unasked, (), _NONE, _NONE))
            changes.set_back = set_back
            # A copy: the arrays are the engine's, and it goes on with them.
            self._held = StepRecord(
                changes,
                batch.req_ids,
                batch.num_computed_tokens,
                batch.num_scheduled_tokens,
                engine_allows is not False,
            ).copied()
        except Exception as error:
            self.end(described(error))

    def settle(self, cuts: Sequence[int] | None, ranks_agreed: bool | None) -> None:
        """Write the step that was recorded last.

        Args:
            cuts: Where it is cut, in tokens; empty: it runs whole; None: not known.
            ranks_agreed: Every rank voted to cut it; None: not known.
        """
        step, self._held = self._held, None
        if step is None or self.recorder is None:
            return
        step.cuts, step.ranks_agreed = cuts, ranks_agreed
        self.recorder.record(step)
        if not self.recorder.open:
            self.end(self.recorder.ended or "closed")

    def retire(self) -> None:
        """Write out what is recorded; another guard has the steps from here on."""
        self.settle(None, None)
        self.on = False
        if self.recorder is not None:
            self.recorder.close(timeout=0.0)

    def end(self, why: str) -> None:
        """Record no further step: a trace with a hole could not be replayed."""
        if self.on:
            self.on = False
            self._counters.trace_ended += 1
            if self.recorder is None or self.recorder.open:
                # Otherwise the recorder has said it.
                self._report.once("trace", f"no trace is written from here on ({why})")
            if self.recorder is not None:
                self.recorder.close(timeout=0.0)

    def _open(self, batch: Batch, groups: Sequence[KVCacheGroup]) -> StepRecorder:
        assert self._settings.trace is not None
        header = TraceHeader(
            block_sizes=tuple(group.tokens_per_column for group in groups),
            sliding_windows=tuple(group.sliding_window for group in groups),
            attention_chunk_sizes=tuple(group.attention_chunk_size for group in groups),
            num_blocks=max((group.num_blocks for group in groups), default=0),
            decode_threshold=batch.decode_threshold,
            decode_query_len=batch.decode_query_len,
            num_ubatches=batch.num_ubatches,
            source="ubatch-guard",
        )
        return StepRecorder.create(
            self._settings.trace,
            self._name,
            header,
            max_bytes=self._settings.trace_max_bytes,
            hash_ids=self._settings.hash_trace_ids,
        )
