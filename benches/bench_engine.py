"""The torch engine's steps, guarded against unguarded."""

from __future__ import annotations

import time
from typing import Any


class EngineStep:
    """A step of the embedded engine on a CPU: what the guard adds to it.

    The workload has no hazard (its requests share nothing), so that guarded and unguarded runs do the same.
    """

    params = ("veto", "reorder")
    param_names = ("policy",)
    version = "1"
    timeout = 300

    def setup_cache(self) -> dict[str, tuple[float, float]]:
        """Per rule: seconds per step, and seconds of it in the guard."""
        try:
            import torch
        except ImportError:
            return {}
        from ubatch_guard.engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
        from ubatch_guard.engine.llm_engine import load_model
        from ubatch_guard.engine.timing import measure
        from ubatch_guard.engine.workloads import independent

        torch.set_num_threads(1)
        config = EngineConfig(
            cache_config=CacheConfig(num_blocks=4096),
            scheduler_config=SchedulerConfig(max_num_batched_tokens=2048),
            parallel_config=ParallelConfig(num_ubatches=2),
        )
        requests = independent(config.model_config.vocab_size, seed=0).requests
        times = measure(
            ("unguarded", *self.params),
            config,
            load_model(config),
            requests,
            repeats=15,
            clock=time.process_time,
        )
        assert all(time.split > 0 for time in times.values())
        return {rule: (time.step_s, time.guard_s) for rule, time in times.items()}

    setup_cache.timeout = 300  # type: ignore[attr-defined]

    def setup(self, times: dict[str, tuple[float, float]], policy: str) -> None:
        if not times:
            raise NotImplementedError("torch is not installed in this environment")

    def track_speed_guarded_to_unguarded(self, times: dict[str, Any], policy: str) -> float:
        """At least 0.98."""
        return float(times["unguarded"][0] / times[policy][0])

    track_speed_guarded_to_unguarded.unit = "ratio"  # type: ignore[attr-defined]

    def track_guard_share_of_a_step(self, times: dict[str, Any], policy: str) -> float:
        return float(times[policy][1] / times[policy][0] * 100)

    track_guard_share_of_a_step.unit = "%"  # type: ignore[attr-defined]

    def track_step_time(self, times: dict[str, Any], policy: str) -> float:
        return float(times[policy][0] * 1e3)

    track_step_time.unit = "ms"  # type: ignore[attr-defined]
