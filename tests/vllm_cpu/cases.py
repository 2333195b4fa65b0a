"""A case: one workload, run whole, with every step cut, under vLLM's own guard (V1), and under ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import outcomes
from cpu_engine import Engine, Run
from workloads import Workload, few_shot

from ubatch_guard.counters import Counters
from ubatch_guard.step import Policy


def measure(
    engine: Engine,
    workload: Workload,
    record: outcomes.Recorder,
    *,
    threshold: int | None = None,
    num_ubatches: int = 2,
    min_tokens: int | None = None,
) -> tuple[outcomes.Outcome, Counters]:
    """Run the case, record it, and check what holds in every case: no answer is wrong under the guard.

    Returns:
        The outcome, and the counters of the run with ``reorder``.
    """
    cut: dict[str, Any] = {
        "dbo": True,
        "num_ubatches": num_ubatches,
        "threshold": threshold,
        "min_tokens": min_tokens,
    }
    engine.set(**cut | {"dbo": False})
    whole = engine.run(workload)
    engine.set(**cut, vllm_guard=False)
    unguarded = engine.run(workload)
    vllm_alone = None
    if not engine.v2:
        engine.set(**cut)
        vllm_alone = engine.run(workload)
    engine.set(**cut, policy=Policy.VETO, verify_every=1)
    veto = engine.run(workload)
    veto_counters = engine.guard.counters
    engine.set(**cut, policy=Policy.REORDER, verify_every=1)
    reorder = engine.run(workload)
    counters = engine.guard.counters

    outcome = outcomes.Outcome(
        release=engine.release,
        runner="V2" if engine.v2 else "V1",
        case=workload.name,
        threshold=threshold,
        requests=len(workload.prompts),
        eligible=whole.steps.eligible,
        unguarded_wrong=unguarded.num_wrong(whole),
        unguarded_split=unguarded.steps.split,
        vllm_wrong=vllm_alone and vllm_alone.num_wrong(whole),
        vllm_split=vllm_alone and vllm_alone.steps.split,
        veto_wrong=veto.num_wrong(whole),
        veto_split=veto.steps.split,
        reorder_wrong=reorder.num_wrong(whole),
        reorder_split=reorder.steps.split,
        demoted_requests=getattr(counters, "demoted_requests", 0),
        demoted_tokens=getattr(counters, "demoted_tokens", 0),
    )
    record(outcome)
    assert unguarded.steps.split == outcome.eligible
    # On V2 the microbatches of a step take turns, as on a GPU.
    assert bool(unguarded.steps.hand_overs) is engine.v2
    # That two right runs compare as equal is shown by these two.
    for run, counted in ((veto, veto_counters), (reorder, counters)):
        assert run.num_wrong(whole) == 0, f"{outcome}; {counted.line()}"
        assert counted.mirror_differences == counted.verify_findings == 0
        # Nothing was left undecided.
        assert counted.vetoed.keys() <= {"unsafe", "no_order"}, counted.line()
        assert run.steps.split == counted.eligible_allowed, counted.line()
        # On V2 every cut is looked at when it is made, also those of one request.
        assert not engine.v2 or counted.verified >= run.steps.split
        _every_request_once(run, whole)
    return outcome, counters


def _every_request_once(run: Run, whole: Run) -> None:
    assert len(run.steps.orders) == len(whole.steps.orders)
    for mine, theirs in zip(run.steps.orders, whole.steps.orders, strict=True):
        assert sorted(name.split("-")[1] for name in mine) == sorted(name.split("-")[1] for name in theirs)


def check_late_start(engine: Engine) -> None:
    """A guard switched on while requests run loses a step at most, and knows them all from then on."""
    workload = few_shot("20-60")
    late = few_shot("20-60", seed=12)
    for prompt in late.prompts:
        workload.add(prompt, arrival=3)
    engine.set(dbo=False, threshold=128)
    whole = engine.run(workload)

    def switch_on(step: int) -> None:
        if step == 1:
            engine.set(dbo=True, threshold=128, policy=Policy.REORDER, verify_every=1)

    engine.set(dbo=False, threshold=128)
    run = engine.run(workload, switch_on)
    counters = engine.guard.counters
    assert run.num_wrong(whole) == 0
    assert counters.vetoed in ({}, {"unknown_request": 1})
    assert counters.reordered == 1
    assert counters.mirror_differences == counters.verify_findings == 0


@contextmanager
def preemptions(engine: Engine) -> Iterator[list[str]]:
    """The ids of the requests that the scheduler preempts meanwhile."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def note_preemption(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = note_preemption
    try:
        yield preempted
    finally:
        scheduler._preempt_request = preempt


@contextmanager
def scheduler_outputs(engine: Engine) -> Iterator[list[Any]]:
    """What the scheduler gives the V1 runner meanwhile, step by step."""
    runner = engine.runner
    update_states, scheduled = runner._update_states, []

    def note_step(scheduler_output: Any) -> Any:
        scheduled.append(scheduler_output)
        return update_states(scheduler_output)

    runner._update_states = note_step
    try:
        yield scheduled
    finally:
        del runner._update_states


def group_values(engine: Engine, name: str) -> set[int | None]:
    """What the specs of the engine's KV cache groups have under ``name``; None: nothing."""
    groups = engine.runner.kv_cache_config.kv_cache_groups
    return {getattr(group.kv_cache_spec, name, None) for group in groups}
