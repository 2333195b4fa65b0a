"""A runner guarded by subclass, under async scheduling: ``python subclass_run.py MODEL v1|v2``; prints JSON.

The plugin is kept away at first (``VLLM_PLUGINS``), then installed as well.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if sys.argv[2] == "v2" else "0"
os.environ["VLLM_PLUGINS"] = ""

import workloads
from async_scheduling import allow_async_scheduling
from cpu_engine import Engine

from ubatch_guard.runner_mixin import UBatchGuardMixin
from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy
from ubatch_guard.vllm import plugin


def main(model: str, version: str) -> None:
    if version == "v2":
        from vllm.v1.worker.cpu import model_runner as module
    else:
        from vllm.v1.worker import cpu_model_runner as module
        from vllm.v1.worker import cpu_worker

    class GuardedRunner(UBatchGuardMixin, module.CPUModelRunner):
        pass

    module.CPUModelRunner = GuardedRunner
    if version == "v1":
        cpu_worker.CPUModelRunner = GuardedRunner
    allow_async_scheduling()
    engine = Engine(Path(model), async_scheduling=True)
    assert isinstance(engine.runner, GuardedRunner)
    assert type(engine.llm.llm_engine.engine_core.engine_core.scheduler).__name__ == "AsyncScheduler"

    workload = workloads.few_shot("20-60")
    engine.set(dbo=False, threshold=128)
    whole = engine.run(workload)
    engine.set(dbo=True, threshold=128)
    results = {"alone": {"wrong": engine.run(workload).num_wrong(whole)}}
    for case in ("subclass", "subclass and plugin"):
        if case != "subclass":
            plugin.install(Settings(policy=Policy.REORDER))
        engine.set(dbo=True, threshold=128, policy=Policy.REORDER, verify_every=1)
        run = engine.run(workload)
        counters = engine.runner.ubatch_guard.counters
        results[case] = {
            "wrong": run.num_wrong(whole),
            "split": run.steps.split,
            "eligible": run.steps.eligible,
            "steps": run.steps.steps,
            "counted": counters.steps,
            "reordered": counters.reordered,
            "vetoed": dict(counters.vetoed),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
