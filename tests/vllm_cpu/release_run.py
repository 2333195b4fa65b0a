"""The few-shot burst on whatever vLLM is first on the path: ``python release_run.py MODEL``; prints JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

import workloads
from cpu_engine import Engine

from ubatch_guard.step import Policy


def main(model: str) -> None:
    import vllm

    engine = Engine(Path(model))
    results = []
    for threshold in (None, 1, 128):
        for suffix in ("1", "20-60"):
            workload = workloads.few_shot(suffix)
            engine.set(dbo=False, threshold=threshold)
            whole = engine.run(workload)
            engine.set(dbo=True, threshold=threshold)
            alone = engine.run(workload)
            engine.set(dbo=True, threshold=threshold, policy=Policy.VETO)
            veto = engine.run(workload)
            engine.set(dbo=True, threshold=threshold, policy=Policy.REORDER, verify_every=1)
            guarded = engine.run(workload)
            results.append(
                {
                    "alone": alone.num_wrong(whole),
                    "veto": veto.num_wrong(whole),
                    "reorder": guarded.num_wrong(whole),
                    "split": guarded.steps.split,
                    "eligible": guarded.steps.eligible,
                    "differences": engine.guard.counters.mirror_differences,
                }
            )
    print(json.dumps({"version": vllm.__version__, "cases": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
