"""A runner without a guard that keeps the step it was asked to vote on, to compare guard and execution."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ubatch_guard.engine.guarded import step_of
from ubatch_guard.engine.runner import Runner
from ubatch_guard.guard import Guard
from ubatch_guard.kv_cache_groups import read_groups
from ubatch_guard.step import Step, Verdict


class RecordingRunner(Runner):
    """Lets every step be cut."""

    step: Step | None = None

    def _allow_microbatching(self, num_reqs: int, num_scheduled_tokens_np: npt.NDArray[np.int32]) -> bool:
        self.step = step_of(self, num_scheduled_tokens_np)
        return True

    def guard(self) -> Guard:
        return Guard(read_groups(self.kv_cache_config).groups, "veto")

    def verdict(self, guard: Guard) -> Verdict | None:
        """The guard's verdict on the last step at the cuts it got, having compared it; None: it ran whole."""
        report = self.last_step
        if not report.cuts:
            assert not report.unwritten_reads
            return None
        assert self.step is not None
        verdict = guard.decide(self.step, report.cuts)
        assert verdict.allow == (not report.unwritten_reads), (self.step, report, verdict)
        caught = {(read.req_id, read.block) for read in report.unwritten_reads}
        for cut in report.cuts:
            for unsafe in guard.decide(self.step, cut).unsafe:
                # The culprits that the guard names are among those caught in the act.
                assert (self.input_batch.req_ids[unsafe.reader], unsafe.block) in caught
        return verdict
