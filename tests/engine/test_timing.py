"""Step times: the runs are the ones asked for, and the guard's share is the guard's."""

from __future__ import annotations

import time

import pytest

from ubatch_guard.engine.config import CacheConfig, EngineConfig, ParallelConfig
from ubatch_guard.engine.llm_engine import load_model
from ubatch_guard.engine.timing import UNGUARDED, WHOLE, StepTimes, measure
from ubatch_guard.engine.workloads import independent
from ubatch_guard.runner.guard import RunnerGuard

from .random_workloads import TINY


def times() -> dict[str, StepTimes]:
    config = EngineConfig(
        model_config=TINY,
        cache_config=CacheConfig(num_blocks=512),
        parallel_config=ParallelConfig(num_ubatches=2),
    )
    requests = independent(TINY.vocab_size, seed=0).requests[:30]
    return measure((WHOLE, UNGUARDED, "veto", "reorder"), config, load_model(config), requests, repeats=2)


def test_every_rule_runs_the_same_steps() -> None:
    got = times()
    assert len({run.steps for run in got.values()}) == 1
    assert got[WHOLE].split == 0
    assert got[UNGUARDED].split == got["veto"].split == got["reorder"].split > 0
    assert got[WHOLE].guard_s == got[UNGUARDED].guard_s == 0
    for policy in ("veto", "reorder"):
        assert 0 < got[policy].guard_s < got[policy].step_s


def test_time_spent_in_the_guard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a guard that dawdles shows."""
    observe = RunnerGuard.observe

    def dawdle(guard: RunnerGuard, scheduler_output: object) -> None:
        time.sleep(0.01)
        observe(guard, scheduler_output)

    monkeypatch.setattr(RunnerGuard, "observe", dawdle)
    assert times()["veto"].guard_s >= 0.01
