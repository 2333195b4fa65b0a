"""Exactness, proven by execution.

Over 1,000 random workloads: unguarded, the sanitizer sees unwritten KV being read in exactly the steps that
the guard calls unsafe at the cuts they got; guarded, it sees none, and the tokens are those of the whole run.
The model runs in float64, where the noise of batch shapes cannot flip an argmax.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ubatch_guard.engine.config import EngineConfig, ModelConfig, ParallelConfig
from ubatch_guard.engine.guarded import GuardedRunner, make_runner
from ubatch_guard.engine.llm_engine import LLMEngine, load_model
from ubatch_guard.engine.model import DecoderModel
from ubatch_guard.engine.runner import Runner
from ubatch_guard.engine.ubatch import multiples
from ubatch_guard.engine.workloads import WorkloadRequest
from ubatch_guard.guard import Guard
from ubatch_guard.reference import vllm_allows
from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy, Step

from .random_workloads import random_workload
from .recording import RecordingRunner

NUM_WORKLOADS = 1000
NUM_PARTS = 8
_MODELS: dict[ModelConfig, DecoderModel] = {}


def model_of(config: EngineConfig) -> DecoderModel:
    if config.model_config not in _MODELS:
        _MODELS[config.model_config] = load_model(config)
    return _MODELS[config.model_config]


def whole_run(config: EngineConfig, requests: list[WorkloadRequest]) -> dict[str, list[int]]:
    config = replace(config, parallel_config=ParallelConfig())
    engine = LLMEngine(config, Runner(config, model_of(config)))
    outputs = engine.serve(requests)
    assert engine.stats.unwritten_reads == 0
    assert engine.stats.split == 0
    return outputs


def unguarded_run(
    config: EngineConfig, requests: list[WorkloadRequest], right: dict[str, list[int]], seen: Counter[str]
) -> None:
    """Compare guard and sanitizer step by step, and count what there was to see."""
    runner = RecordingRunner(config, model_of(config))
    guard = runner.guard()
    engine = LLMEngine(config, runner)

    def compare(_: int) -> None:
        verdict = runner.verdict(guard)
        if verdict is None:
            return
        report, step = runner.last_step, runner.step
        assert step is not None
        vllm = vllm_allows(step, config.reorder_batch_threshold)
        seen["split steps"] += 1
        seen["unsafe steps"] += not verdict.allow
        seen["unsafe at one of two cuts"] += not verdict.allow and len(report.cuts) == 2
        seen["unsafe in both groups"] += (
            len({read.layer for read in report.unwritten_reads}) == len(step.groups) == 2
        )
        seen["missed by vLLM"] += vllm and not verdict.allow
        seen["needlessly vetoed by vLLM"] += verdict.allow and not vllm

    wrong = engine.serve(requests, compare) != right
    assert engine.stats.unsafe_steps or not wrong
    seen["wrong workloads"] += wrong
    seen["unsafe workloads"] += engine.stats.unsafe_steps > 0


def guarded_run(
    rule: str, config: EngineConfig, requests: list[WorkloadRequest], right: dict[str, list[int]]
) -> None:
    runner = make_runner(rule, config, model_of(config))
    assert isinstance(runner, GuardedRunner)
    runner.ubatch_guard_settings = Settings(policy=Policy(rule), verify_every=1)
    engine = LLMEngine(config, runner)
    assert engine.serve(requests) == right
    assert engine.stats.unwritten_reads == 0
    if rule == "reorder":
        assert engine.stats.split == engine.stats.eligible
    assert runner.ubatch_guard is not None
    counters = runner.ubatch_guard.counters
    assert counters.steps == engine.stats.steps
    assert counters.mirror_differences == 0
    assert counters.vetoed.keys() <= {"unsafe"}  # nothing was undecided


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_guard_and_execution_agree(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, NUM_WORKLOADS, NUM_PARTS):
        config, requests = random_workload(seed)
        try:
            right = whole_run(config, requests)
            unguarded_run(config, requests, right, seen)
            guarded_run("reorder" if seed // NUM_PARTS % 2 else "veto", config, requests, right)
        except AssertionError as error:
            raise AssertionError(f"random_workload({seed})") from error
    # The agreement would mean nothing without hazards of each kind, safe steps that look like hazards, and
    # answers that do come out wrong.
    print(dict(seen))
    for kind in (
        "unsafe steps",
        "unsafe at one of two cuts",
        "unsafe in both groups",
        "missed by vLLM",
        "needlessly vetoed by vLLM",
        "wrong workloads",
    ):
        assert seen[kind] > 0, kind


def moved_run(
    config: EngineConfig, requests: list[WorkloadRequest], right: dict[str, list[int]], seen: Counter[str]
) -> None:
    """Every step is cut as near to its midpoints as is safe, and where veto cuts, at the midpoints."""
    vetoing = LLMEngine(config, make_runner("veto", config, model_of(config)))
    vetoing.serve(requests)
    runner = make_runner("move", config, model_of(config))
    engine = LLMEngine(config, runner)

    def compare(_: int) -> None:
        report = runner.last_step
        if not report.eligible:
            return
        midpoints = tuple(multiples(report.num_tokens, config.parallel_config.num_ubatches))
        seen["eligible"] += 1
        seen["cut at the midpoints"] += report.cuts == midpoints
        seen["cut elsewhere"] += report.cuts not in ((), midpoints)
        seen["run whole"] += not report.cuts

    assert engine.serve(requests, compare) == right
    assert engine.stats.unwritten_reads == 0
    assert engine.stats.eligible == vetoing.stats.eligible
    assert engine.stats.split >= vetoing.stats.split
    seen["cut by veto"] += vetoing.stats.split


def test_moved_cuts_are_exact() -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        config, requests = random_workload(seed)
        try:
            moved_run(config, requests, whole_run(config, requests), seen)
        except AssertionError as error:
            raise AssertionError(f"random_workload({seed})") from error
    print(dict(seen))
    assert seen["cut at the midpoints"] + seen["cut elsewhere"] > seen["cut by veto"] > 0
    assert seen["cut elsewhere"] > 0
    assert seen["run whole"] > 0


def test_cuts_moved_the_other_way_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a runner that looks for its cut among the unsafe ones reads what is not written."""
    monkeypatch.setattr(Guard, "nearest_safe_cuts", nearest_unsafe_cuts)
    unsafe_steps = 0
    for seed in range(30):
        config, requests = random_workload(seed)
        engine = LLMEngine(config, make_runner("move", config, model_of(config)))
        engine.serve(requests)
        unsafe_steps += engine.stats.unsafe_steps
    assert unsafe_steps > 0


def nearest_unsafe_cuts(guard: Guard, step: Step, targets: list[int]) -> tuple[int, ...]:
    unsafe = {cut for found in guard.unsafe_cuts(step) for cut in range(found.first, found.last + 1)}
    return (min(unsafe, key=lambda cut: abs(cut - targets[0]), default=targets[0]), *targets[1:])


def test_vllms_rule_and_execution_disagree() -> None:
    """Negative control: a rule that is not exact fails the comparison above."""
    disagreements = 0
    for seed in range(60):
        config, requests = random_workload(seed)
        runner = make_runner("vllm", config, model_of(config))
        engine = LLMEngine(config, runner)
        engine.serve(requests)
        disagreements += engine.stats.unsafe_steps
    assert disagreements > 0
