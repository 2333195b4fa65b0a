"""One rank of a data-parallel run, for test_parallel.py; torchrun starts several.

Usage: dp_worker.py FOLDER RULES [die|hang STEP]

Writes the tokens and the counts of this rank under each of the RULES to FOLDER/rank-N.json; the rule
"recorded" cuts every step and compares guard and execution. With the last arguments the last rank meets its
end in that step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ubatch_guard.engine.guarded import make_runner
from ubatch_guard.engine.llm_engine import LLMEngine, load_model
from ubatch_guard.engine.parallel import Ranks, init_ranks
from ubatch_guard.engine.workloads import Workload

sys.path.insert(0, str(Path(__file__).parent))
from parallel_workload import parallel_workload
from recording import RecordingRunner


def serve(ranks: Ranks, rule: str, end: str, end_step: int) -> dict[str, Any]:
    config, requests = parallel_workload()
    parallel = replace(config.parallel_config, data_parallel_size=ranks.size, data_parallel_rank=ranks.rank)
    config = replace(config, parallel_config=parallel)
    model = load_model(config, None, ranks)
    recorded = rule == "recorded"
    runner = RecordingRunner(config, model, ranks) if recorded else make_runner(rule, config, model, ranks)
    engine = LLMEngine(config, runner)
    padded, moved_cuts = [], 0

    def on_step(_: int) -> None:
        nonlocal moved_cuts
        report = runner.last_step
        padded.append(report.num_tokens_padded)
        moved_cuts += bool(report.cuts) and report.cuts != (report.num_tokens // 2,)
        if isinstance(runner, RecordingRunner):
            runner.verdict(runner.guard())
        if ranks.rank == ranks.size - 1 and engine.stats.steps == end_step:
            if end == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)

    engine.serve(Workload("test", requests).of_rank(ranks.rank, ranks.size).requests, on_step)
    names = ("steps", "idle_steps", "eligible", "split", "unwritten_reads", "unsafe_steps")
    counts = {name: getattr(engine.stats, name) for name in names}
    return {"outputs": engine.outputs, "num_tokens_padded": padded, "moved_cuts": moved_cuts, **counts}


def main(folder: Path, rules: list[str], end: str = "", end_step: int = -1) -> None:
    torch.set_num_threads(1)
    # The time-out covers the start too, where ranks wait for the slowest to come up.
    ranks = init_ranks(torch.device("cpu"), timeout_s=15.0 if end == "hang" else 60.0)
    reports = {rule: serve(ranks, rule, end, end_step) for rule in rules}
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(reports))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), *sys.argv[3:4], *map(int, sys.argv[4:5]))
