"""Random histories on the scheduler of the vLLM that is installed: which batch orders have an unsafe cut?

    python tests/vllm_cpu/scheduler_fuzz.py [--seed N] [--steps N] [--failing-loads] [--policy fcfs|priority]

Prints what `ubatch_guard.vllm.scheduler_histories.run` returns, as JSON. A vLLM that cannot be driven so
gives ``{"not_available": reason}`` and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from ubatch_guard.vllm.scheduler_histories import ENVIRONMENT, NotAvailable, run

__all__ = ["run"]

# vLLM reads its environment when it is imported, which `run` does.
os.environ.update(ENVIRONMENT)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--failing-loads", action="store_true", help="loads of a KV connector fail")
    parser.add_argument("--policy", choices=("fcfs", "priority"), help="default: drawn for each history")
    given = parser.parse_args()
    try:
        result = run(given.seed, given.steps, given.failing_loads, policy=given.policy)
    except NotAvailable as error:
        print(json.dumps({"not_available": str(error)}))
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
