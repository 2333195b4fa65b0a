"""The generations of vLLM's model runners. To drop one, delete its file, its tests and its entry here."""

from __future__ import annotations

from typing import Any

from ubatch_guard.runner.guard import RunnerGuard
from ubatch_guard.vllm.generation import Generation
from ubatch_guard.vllm.v1 import V1
from ubatch_guard.vllm.v2 import V2

GENERATIONS: tuple[Generation, ...] = (V2, V1)
"""The newest first."""


def generation_of(cls: type) -> Generation | None:
    """The generation whose shape a runner class has; None: it has neither."""
    return next((generation for generation in GENERATIONS if hasattr(cls, generation.mark)), None)


def runner_guard(runner: Any) -> RunnerGuard | None:
    """The guard of ``runner``, made at the first call; None when it is off. Never raises in a step."""
    generation = generation_of(type(runner))
    return None if generation is None else generation.guard_of(runner)
