"""V2 without the package, on the vLLM first on the path: ``python patched_run.py MODEL``; prints JSON.

The few-shot burst, in one go and in chunks, and decodes cut too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
# The package is not loaded into vLLM.
os.environ["VLLM_PLUGINS"] = ""

import workloads
from cpu_engine import Engine


def main(model: str) -> None:
    import vllm

    results = []
    for tokens, min_tokens in ((4096, 64), (512, 8), (300, 2)):
        engine = Engine(Path(model), max_num_batched_tokens=tokens, min_tokens=min_tokens)
        for workload in (
            workloads.few_shot("20-60"),
            workloads.few_shot("20-300"),
            workloads.chunked_prefill(),
        ):
            engine.set(dbo=False)
            whole = engine.run(workload)
            engine.set(dbo=True)
            cut = engine.run(workload)
            results.append(
                {
                    "case": f"{workload.name}, {tokens} tokens a step",
                    "wrong": cut.num_wrong(whole),
                    "requests": len(workload.prompts),
                    "split": cut.steps.split,
                    "eligible": cut.steps.eligible,
                }
            )
        engine.close()
    print(json.dumps({"vllm": vllm.__file__, "cases": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
