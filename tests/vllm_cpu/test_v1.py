"""Model Runner V1, room for every step: bursts, rollouts, retrieval."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import runners

runners.use("v1")

import workloads
from cases import check_late_start, measure
from cpu_engine import Engine
from outcomes import Recorder
from tiny_models import save_tiny_model

from ubatch_guard.step import Policy

MOST_CALLS = 1.01
"""Python calls a step with the guard to those without it. Counted: 8,458 to 8,426, or 1.004."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(save_tiny_model(tmp_path_factory.mktemp("llama")))
    yield engine
    engine.close()


@pytest.mark.parametrize("threshold", [None, 1, 128])
@pytest.mark.parametrize("suffix", workloads.SUFFIXES)
def test_few_shot_burst(engine: Engine, suffix: str, threshold: int | None, record_outcome: Recorder) -> None:
    outcome, counters = measure(engine, workloads.few_shot(suffix), record_outcome, threshold=threshold)
    # Reordered or not, the burst is cut.
    assert outcome.reorder_split == outcome.eligible > 0
    assert counters.num_vetoed == 0
    if threshold is not None:
        # vLLM sorts the readers to the front: without any guard the answers are wrong, and the suite sees it.
        assert outcome.unguarded_wrong > 0
        assert counters.reordered > 0
        assert outcome.veto_split < outcome.eligible
    if threshold == 128 and suffix != "20-300":
        # Readers shorter than the threshold are decodes to vLLM's own guard.
        assert outcome.vllm_wrong == outcome.unguarded_wrong >= 6


@pytest.mark.parametrize("threshold", [1, 128])
@pytest.mark.parametrize("workload", [workloads.grpo, workloads.rag])
def test_traffic(engine: Engine, workload, threshold: int | None, record_outcome: Recorder) -> None:
    outcome, _ = measure(engine, workload(), record_outcome, threshold=threshold)
    assert outcome.reorder_split == outcome.eligible > 0
    assert outcome.unguarded_wrong > 0


@pytest.mark.parametrize("num_ubatches", [3, 4])
def test_more_microbatches(engine: Engine, num_ubatches: int) -> None:
    workload = workloads.few_shot("20-300")
    engine.set(dbo=False, threshold=128)
    whole = engine.run(workload)
    engine.set(dbo=True, num_ubatches=num_ubatches, threshold=128, vllm_guard=False)
    assert engine.run(workload).num_wrong(whole) > 0
    engine.set(dbo=True, num_ubatches=num_ubatches, threshold=128, policy=Policy.REORDER)
    guarded = engine.run(workload)
    assert guarded.num_wrong(whole) == 0
    assert guarded.steps.split == guarded.steps.eligible


def test_overhead(engine: Engine, record_outcome: Recorder) -> None:
    """The guard's share in steps that run decodes only: of the calls, and for the record of processor time.

    Calls are held to a bound because no noise touches them. Seconds are not.
    """
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("of an engine whose kernels run in Triton's interpreter a step tells nothing")
    text = workloads.Text(9)
    workload = workloads.Workload("decodes")
    for _ in range(80):
        workload.add(text.tokens(64), max_tokens=40)

    def run(policy: Policy | None, before_step: Callable[[int], None]) -> None:
        engine.set(dbo=True, threshold=1, policy=policy)
        steps = engine.run(workload, before_step).steps
        assert steps.split == steps.eligible > 0

    calls = {policy: _calls_a_step(functools.partial(run, policy)) for policy in (None, Policy.REORDER)}
    seconds: dict[Policy | None, list[float]] = {None: [], Policy.REORDER: []}
    for turn in range(4):
        for policy in seconds if turn % 2 else reversed(seconds):
            starts: list[float] = []
            run(policy, lambda step, starts=starts: starts.append(time.process_time()))
            # All but the first, which is the prefill.
            seconds[policy] += np.diff(starts)[1:].tolist()
    # What else runs on the machine only ever adds.
    off, on = (1e3 * np.percentile(times, 10) for times in seconds.values())
    record_outcome.note(
        engine.release,
        f"V1, a step of 80 decodes: {off:.2f} ms of processor time with the guard off, {on:.2f} ms with "
        f"`reorder`; ratio {on / off:.3f}. Python calls: {calls[None]:.0f} and {calls[Policy.REORDER]:.0f}.",
    )
    assert 1 < calls[Policy.REORDER] / calls[None] <= MOST_CALLS


def _calls_a_step(run: Callable[[Callable[[int], None]], None]) -> float:
    """Calls of Python functions in a step after the first."""
    calls, counted = 0, []

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    def before_step(step: int) -> None:
        counted.append(calls)

    sys.setprofile(count)
    try:
        run(before_step)
    finally:
        sys.setprofile(None)
    return float(np.median(np.diff(counted)[1:]))


def test_a_guard_switched_on_while_requests_run(engine: Engine) -> None:
    check_late_start(engine)
