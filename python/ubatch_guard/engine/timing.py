"""Step times of one workload under several rules, and the guard's share of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ubatch_guard.runner_mixin import UBatchGuardMixin
from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy

from .config import EngineConfig, ParallelConfig
from .llm_engine import LLMEngine
from .model import DecoderModel
from .outputs import SchedulerOutput
from .runner import Runner
from .workloads import WorkloadRequest

WHOLE, UNGUARDED = "whole", "unguarded"
"""Runs in which no step is cut, and every step that is large enough; the others go by a policy's name."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long the steps of a run took.

    Attributes:
        steps: Steps.
        split: Of those, cut.
        step_s: Mean time of a step in seconds, scheduler and sampling included; of each step the fastest of
            several runs counts.
        guard_s: The guard's part of it in seconds: all that the mixin's hooks add to the runner's own.
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
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, StepTimes]:
    """Serve the workload under each rule in turn, ``repeats`` times over, after one run that does not count.

    Args:
        rules: `WHOLE`, `UNGUARDED`, or values of `Policy`.
        config: The engine.
        model: Its model.
        requests: The workload.
        repeats: Runs per rule that count.
        clock: Seconds. On a CPU that is busy with other things, ``time.process_time``, which counts what this
            process's threads do, compares better.

    Raises:
        ValueError: A rule is not known.
    """
    fastest: dict[str, list[float]] = {}
    guard_s: dict[str, list[float]] = {}
    engines: dict[str, LLMEngine] = {}
    for repeat in range(repeats + 1):
        turn = repeat % len(rules)  # so that no rule always runs behind the same one
        for rule in (*rules[turn:], *rules[:turn]):
            engine, times, in_guard = _timed_run(rule, config, model, requests, clock)
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


class _Inner(Runner):
    """Takes the time of the runner's own hooks off the guard's account."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)
    guard_s: float = 0.0

    def _account(self, sign: int, hook: Callable[..., _Result], *args: Any) -> _Result:
        started = self.clock()
        try:
            return hook(*args)
        finally:
            self.guard_s += sign * (self.clock() - started)

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        self._account(-1, super()._update_states, scheduler_output)

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        self._account(-1, super()._may_reorder_batch, scheduler_output)

    def _allow_microbatching(self, num_reqs: int, num_scheduled_tokens_np: npt.NDArray[np.int32]) -> bool:
        return self._account(-1, super()._allow_microbatching, num_reqs, num_scheduled_tokens_np)


class _Outer(UBatchGuardMixin, _Inner):
    """Puts the time of the hooks, guard and all, on the account."""


def _accounted(hooked: Callable[..., Any]) -> Callable[..., Any]:
    return lambda runner, *args: runner._account(1, hooked, runner, *args)


# Around the hooks, which the mixin puts around whatever the class itself has.
for _name in ("_update_states", "_may_reorder_batch", "_allow_microbatching"):
    setattr(_Outer, _name, _accounted(getattr(_Outer, _name)))


def _timed_run(
    rule: str,
    config: EngineConfig,
    model: DecoderModel,
    requests: Sequence[WorkloadRequest],
    clock: Callable[[], float],
) -> tuple[LLMEngine, list[float], float]:
    """One run: the engine, seconds per step, seconds in the guard."""
    runner: Runner
    if rule == WHOLE:
        config = replace(config, parallel_config=ParallelConfig())
        runner = Runner(config, model)
    elif rule == UNGUARDED:
        runner = Runner(config, model)
    else:
        runner = _Outer(config, model)
        runner.ubatch_guard_settings = Settings(policy=Policy(rule))
        runner.clock = clock
    engine = LLMEngine(config, runner)
    times: list[float] = []
    started = clock()

    def on_step(_: int) -> None:
        nonlocal started
        now = clock()
        times.append(now - started)
        started = now

    engine.serve(requests, on_step)
    return engine, times, getattr(runner, "guard_s", 0.0)
