"""The generations of vLLM's model runners. To drop one, delete its file, its tests and its entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ubatch_guard.runner.guard import RunnerGuard
from ubatch_guard.vllm import v1, v2
from ubatch_guard.vllm.generation import Generation

GENERATIONS: tuple[Generation, ...] = (v2.V2, v1.V1)
"""The newest first."""

_GUARD_OF: dict[str, Callable[[Any], RunnerGuard | None]] = {"v1": v1.guard_of, "v2": v2.guard_of}


def generation_of(cls: type) -> Generation | None:
    """The generation whose shape a runner class has; None: it has neither."""
    return next((generation for generation in GENERATIONS if hasattr(cls, generation.mark)), None)


def runner_guard(runner: Any) -> RunnerGuard | None:
    """The guard of ``runner``, made at the first call; None when it is off. Never raises in a step."""
    generation = generation_of(type(runner))
    return None if generation is None else _GUARD_OF[generation.name](runner)
