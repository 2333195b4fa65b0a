"""``make demo-vllm``: what the real vLLM answers when its steps are cut, without the guard and with it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import workloads
from cpu_engine import Engine
from tiny_models import save_tiny_model

from ubatch_guard.step import Policy

CASES = {
    "8 questions over one few-shot prompt": lambda: workloads.few_shot("20-60"),
    "rollouts: 4 prompts, 4 times each": lambda: workloads.grpo(groups=4, size=4),
    "12 questions over shared documents": lambda: workloads.rag(requests=12),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(save_tiny_model(Path(folder)))
    print(f"vLLM {engine.release} on a CPU, a tiny model. Wrong: not what it answers when no step is cut.\n")
    print(f"{'':38}{'without the guard':^25}{'with ubatch-guard':^25}")
    print(f"{'':38}{'wrong':>12}{'steps cut':>13}{'wrong':>12}{'steps cut':>13}")
    for name, make in CASES.items():
        workload = make()
        engine.set(dbo=False)
        whole = engine.run(workload)
        cells = []
        for policy in (None, Policy.REORDER):
            engine.set(dbo=True, policy=policy)
            run = engine.run(workload)
            cells.append(f"{run.num_wrong(whole)} of {len(workload.prompts)}".rjust(12))
            cells.append(f"{run.steps.split} of {run.steps.eligible}".rjust(13))
        print(f"{name:38}{''.join(cells)}", flush=True)
    print("\nCut: into two microbatches, by vLLM itself. More cases: docs/vllm-outcomes.md")


if __name__ == "__main__":
    main()
