"""Step times of one workload under several rules, and the guard's share of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .config import EngineConfig, ParallelConfig
from .guarded import make_runner
from .llm_engine import LLMEngine
from .model import DecoderModel
from .workloads import WorkloadRequest

WHOLE = "whole"
"""Names the run in which no step is cut, beside the rules of `guarded.make_runner`."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long the steps of a run took.

    Attributes:
        steps: Steps.
        split: Of those, cut.
        step_s: Mean time of a step in seconds, scheduler and sampling included; of each step the fastest of
            several runs counts.
        guard_s: The guard's part of it in seconds: following the scheduler, planning, voting.
    """

    steps: int
    split: int
    step_s: float
    guard_s: float


def measure(
    rules: Sequence[str],
    config: EngineConfig,
    model: DecoderModel,
    requests: Sequence[WorkloadRequest],
    repeats: int = 5,
) -> dict[str, StepTimes]:
    """Serve the workload under each rule in turn, ``repeats`` times over, after one run that does not count.

    Raises:
        ValueError: A rule is not known.
    """
    fastest: dict[str, list[float]] = {}
    guard_s: dict[str, list[float]] = {}
    engines: dict[str, LLMEngine] = {}
    for repeat in range(repeats + 1):
        for rule in rules:
            engine, times, in_guard = _timed_run(rule, config, model, requests)
            engines[rule] = engine
            if repeat:
                best = fastest.get(rule, times)
                fastest[rule] = [min(pair) for pair in zip(best, times, strict=True)]
                guard_s.setdefault(rule, []).append(in_guard)
    return {
        rule: StepTimes(
            steps=engine.stats.steps,
            split=engine.stats.split,
            step_s=sum(fastest[rule]) / engine.stats.steps,
            guard_s=min(guard_s[rule]) / engine.stats.steps,
        )
        for rule, engine in engines.items()
    }


def _timed_run(
    rule: str, config: EngineConfig, model: DecoderModel, requests: Sequence[WorkloadRequest]
) -> tuple[LLMEngine, list[float], float]:
    """One run: the engine, seconds per step, seconds in the guard."""
    if rule == WHOLE:
        config, rule = replace(config, parallel_config=ParallelConfig()), "unguarded"
    engine = LLMEngine(config, make_runner(rule, config, model))
    guard = getattr(engine.runner, "ubatch_guard", None)
    in_guard = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal in_guard
            started = time.perf_counter()
            try:
                return method(*args)
            finally:
                in_guard += time.perf_counter() - started

        return call

    for name in ("observe", "plan", "vote") if guard is not None else ():
        setattr(guard, name, timed(getattr(guard, name)))

    times: list[float] = []
    started = time.perf_counter()

    def on_step(_: int) -> None:
        nonlocal started
        now = time.perf_counter()
        times.append(now - started)
        started = now

    engine.serve(requests, on_step)
    return engine, times, in_guard
