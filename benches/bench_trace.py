"""Traces of real steps: reading them, auditing them, and the guard's share of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ubatch_guard import reference
from ubatch_guard.bench import Call, Subjects, in_turns
from ubatch_guard.step import Policy
from ubatch_guard.trace import TraceReader
from ubatch_guard.trace.audit import AuditOptions, TraceAudit, audit_trace
from ubatch_guard.trace.replay import Replay

FOLDER = Path(__file__).parent.parent / "tests" / "traces"
NAMES = ("grpo-t1", "rag-preempt-t1")
STEPS = 40
"""Steps of a trace, from its first, that are timed one by one."""


def _path(name: str) -> Path:
    return FOLDER / f"{name}.jsonl.gz"


def _figures(audit: TraceAudit) -> tuple[int, ...]:
    return audit.steps, audit.eligible, audit.hazardous, audit.vetoed, audit.reordered


class Trace:
    """A whole trace."""

    params = NAMES
    param_names = ("trace",)
    version = "1"
    timeout = 300

    def setup_cache(self) -> dict[str, tuple[int, ...]]:
        """What the slow reference finds."""
        options = AuditOptions(policy=Policy.REORDER, reference=True)
        return {name: _figures(audit_trace(_path(name), options)) for name in NAMES}

    def setup(self, expected: dict[str, tuple[int, ...]], name: str) -> None:
        audit = audit_trace(_path(name), AuditOptions(policy=Policy.REORDER))
        assert _figures(audit) == expected[name]

    def time_read(self, expected: dict[str, tuple[int, ...]], name: str) -> None:
        with TraceReader(_path(name)) as reader:
            for _ in reader:
                pass

    def time_audit(self, expected: dict[str, tuple[int, ...]], name: str) -> None:
        audit_trace(_path(name), AuditOptions(policy=Policy.REORDER))

    def peakmem_audit(self, expected: dict[str, tuple[int, ...]], name: str) -> None:
        audit_trace(_path(name), AuditOptions(policy=Policy.REORDER))


class Replayed:
    """The guard against vLLM's rule over the first steps of a trace."""

    params = NAMES
    param_names = ("trace",)
    unit = "times as fast"
    version = "1"
    timeout = 300

    def setup(self, name: str) -> None:
        self.subjects = []
        with TraceReader(_path(name)) as reader:
            replay = Replay(reader.header)
            threshold = reader.header.decode_threshold or 1
            for record in reader:
                step = replay.step(record)
                subjects = Subjects(step, threshold)
                if step.num_reqs < 2:
                    continue
                subjects.check()
                assert reference.vllm_allows(step, threshold) is record.vllm_allows
                self.subjects.append(subjects)
                if len(self.subjects) == STEPS:
                    break

    def track_mirror(self, name: str) -> float:
        return self._ratio([subjects.mirrored for subjects in self.subjects])

    def track_stateless(self, name: str) -> float:
        return self._ratio([subjects.stateless for subjects in self.subjects])

    def _ratio(self, guard: Sequence[Call]) -> float:
        numpy_rule = [subjects.numpy_rule for subjects in self.subjects]
        us = in_turns({"numpy": partial(_ask, numpy_rule), "guard": partial(_ask, guard)}, 7)
        return us["numpy"] / us["guard"]


def _ask(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
