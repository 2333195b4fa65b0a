"""One data-parallel rank: ``python dp_rank.py MODEL RANK RANKS PORT``; prints what became of it as JSON.

Each rank is a process with a real engine. The vote is vLLM's own ``coordinate_batch_across_dp`` over gloo;
a rank without a request keeps the others company in it, as vLLM's idle ranks do by a dummy batch of one
token.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

import workloads
from cpu_engine import Engine, Run

from ubatch_guard.step import Policy

VOTES = 8
"""Rounds of voting per scenario: more than any rank has steps."""


class Rank:
    """An engine and its place among the ranks."""

    def __init__(self, model: Path, rank: int, ranks: int, port: int) -> None:
        self.engine = Engine(model, max_num_seqs=64)
        self.rank = rank
        self.votes = 0
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group
        from vllm.v1.worker import dp_utils

        group = stateless_init_torch_distributed_process_group("127.0.0.1", port, rank, ranks, backend="gloo")
        # The engine's own group has one rank; the vote is taken in this one.
        dp_utils.get_dp_group = lambda: types.SimpleNamespace(
            device="cpu", device_group=group, cpu_group=group
        )
        self._coordinate = dp_utils.coordinate_batch_across_dp
        self._config = copy.copy(self.engine.runner.parallel_config)
        self._config.data_parallel_size = ranks
        self._config.data_parallel_rank = rank

    def vote(self, num_tokens: int, padded: int, allowed: bool, uniform: bool) -> tuple[bool, int]:
        self.votes += 1
        self._config.enable_dbo = True
        split, across, _ = self._coordinate(
            num_tokens_unpadded=num_tokens,
            parallel_config=self._config,
            allow_microbatching=allowed,
            num_tokens_padded=padded,
            uniform_decode=uniform,
        )
        return split, int(across[self.rank])

    def scenario(
        self, workload: workloads.Workload | None, *, whole: Run | None, fault: bool = False, **guard: Any
    ):
        """Run ``workload`` (None: be idle) among the ranks; what became of it."""
        engine = self.engine
        engine.set(dbo=True, threshold=128, **guard)
        if fault:
            engine.guard.mirror = _Faulty()
        engine.vote, self.votes = self.vote, 0
        run = engine.run(workload) if workload else None
        engine.vote = None
        counters = engine.guard.counters
        while self.votes < VOTES:
            self.vote(1, 1, True, True)
        return {
            "wrong": run.num_wrong(whole) if run and whole else 0,
            "steps": run.steps.steps if run else 0,
            "split": run.steps.split if run else 0,
            "reordered": counters.reordered,
            "vetoed": dict(counters.vetoed),
        }


class _Faulty:
    """A mirror that fails at whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")

    def __contains__(self, request_id: object) -> bool:
        raise RuntimeError("nothing in here")


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
    main(sys.argv[1], *map(int, sys.argv[2:]))
