"""One data-parallel rank: ``python dp_rank.py RUNNER MODEL RANK RANKS PORT``; prints what became of it.

Each rank is a process with a real engine. The vote is vLLM's own over gloo: ``coordinate_batch_across_dp`` on
V1, ``dispatch_cg_and_sync_dp`` on V2. A rank without a request keeps the others company in it, as vLLM's idle
ranks do by a dummy batch of one token.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

RUNNER = sys.argv[1]
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(RUNNER == "v2"))

import workloads
from cpu_engine import Engine, Run

from ubatch_guard.step import Policy

VOTES = 8
"""Rounds of voting per scenario: more than any rank has steps."""
VOTING = {"v1": "vllm.v1.worker.dp_utils", "v2": "vllm.v1.worker.gpu.dp_utils"}


class Rank:
    """An engine and its place among the ranks."""

    def __init__(self, model: Path, rank: int, ranks: int, port: int) -> None:
        self.engine = Engine(model, max_num_seqs=64)
        self.place = ranks, rank
        import torch.distributed
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        group = stateless_init_torch_distributed_process_group("127.0.0.1", port, rank, ranks, backend="gloo")
        # The engine's own group has one rank; the vote is taken in this one.
        importlib.import_module(VOTING[RUNNER]).get_dp_group = lambda: types.SimpleNamespace(
            device="cpu",
            device_group=group,
            cpu_group=group,
            cpu_all_reduce_=lambda tensor: torch.distributed.all_reduce(tensor, group=group),
        )

    def scenario(
        self, workload: workloads.Workload | None, *, whole: Run | None, fault: bool = False, **guard: Any
    ) -> dict[str, Any]:
        """Run ``workload`` (None: be idle) among the ranks; what became of it."""
        engine = self.engine
        engine.set(dbo=True, threshold=128, **guard)
        if fault:
            _hide_scheduler_outputs(engine.runner)
        engine.ranks, engine.votes = self.place, 0
        run = engine.run(workload) if workload else None
        while engine.votes < VOTES:
            engine.keep_company()
        engine.ranks = None
        engine.runner.__dict__.pop("execute_model", None)
        counters = engine.guard.counters
        return {
            "wrong": run.num_wrong(whole) if run and whole else 0,
            "steps": run.steps.steps if run else 0,
            "split": run.steps.split if run else 0,
            "reordered": counters.reordered,
            "vetoed": dict(counters.vetoed),
        }


class _Hidden:
    """What vLLM can read and the guard fails at."""

    def __init__(self, scheduler_output: Any) -> None:
        self._scheduler_output = scheduler_output

    def __getattr__(self, name: str) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("ubatch_guard."):
            raise RuntimeError(f"no {name} here")
        return getattr(self._scheduler_output, name)


def _hide_scheduler_outputs(runner: Any) -> None:
    execute_model = runner.execute_model

    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        return execute_model(_Hidden(scheduler_output), *args, **kwargs)

    runner.execute_model = execute


def main(model: str, rank: int, ranks: int, port: int) -> None:
    member = Rank(Path(model), rank, ranks, port)
    # Every rank has another number of tokens, so that the padding moves the cuts of all but one.
    burst = workloads.few_shot("20-60", prefix=320 + 64 * rank, requests=4 + rank)
    member.engine.set(dbo=False, threshold=128)
    whole = member.engine.run(burst)
    first = rank == 0
    reorder = {"policy": Policy.REORDER}
    results = {
        "unguarded": member.scenario(burst, whole=whole, policy=Policy.OBSERVE),
        "reorder": member.scenario(burst, whole=whole, **reorder),
        "one vetoes": member.scenario(burst, whole=whole, policy=Policy.VETO if first else Policy.REORDER),
        "one raises": member.scenario(burst, whole=whole, fault=first, **reorder),
        "one idle": member.scenario(None if first else burst, whole=whole, **reorder),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[2], *map(int, sys.argv[3:]))
