"""Ranks under torchrun: they answer as a single rank does, and none outlives another's end for long."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ubatch_guard.engine.config import ParallelConfig
from ubatch_guard.engine.guarded import make_runner
from ubatch_guard.engine.llm_engine import LLMEngine, load_model
from ubatch_guard.engine.parallel import ExpertRoute, Ranks, coordinate_batch_across_dp

from .parallel_workload import parallel_workload

WORKER = Path(__file__).with_name("dp_worker.py")


def environment(**extra: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | extra


def torchrun(size: int, *program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return subprocess.run(
        [*command, *program], env=environment(), capture_output=True, text=True, timeout=300
    )


def reports(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def single_rank() -> dict[str, list[int]]:
    config, requests = parallel_workload()
    engine = LLMEngine(config, make_runner("reorder", config, load_model(config)))
    return engine.serve(requests)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_answer_as_one_does(size: int, single_rank: dict[str, list[int]], tmp_path: Path) -> None:
    done = torchrun(size, str(WORKER), str(tmp_path), "reorder,veto,recorded")
    assert done.returncode == 0, done.stderr
    for rule in ("reorder", "veto", "recorded"):
        ranks = [report[rule] for report in reports(tmp_path, size)]
        outputs = {req_id: tokens for rank in ranks for req_id, tokens in rank["outputs"].items()}
        unwritten_reads = sum(rank["unwritten_reads"] for rank in ranks)
        for name in ("steps", "eligible", "split", "num_tokens_padded"):
            assert len({json.dumps(rank[name]) for rank in ranks}) == 1, name
        assert 0 < ranks[0]["eligible"] < ranks[0]["steps"]
        assert ranks[0]["idle_steps"] > 0  # and still took part
        if rule == "recorded":  # Negative control: there is a hazard, and the tokens show it.
            assert outputs != single_rank
            assert unwritten_reads > 0
            # Guard and execution agreed on each rank, at cuts that the other's padding moved.
            assert sum(rank["moved_cuts"] for rank in ranks) > 0
            assert 0 < sum(rank["unsafe_steps"] for rank in ranks) < sum(rank["split"] for rank in ranks)
            continue
        assert outputs == single_rank
        assert unwritten_reads == 0
        assert (ranks[0]["split"] == ranks[0]["eligible"]) == (rule == "reorder")


def test_torchrun_ends_when_a_rank_is_killed(tmp_path: Path) -> None:
    done = torchrun(2, str(WORKER), str(tmp_path), "reorder", "die", "3")
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_demo_on_ranks_moves_no_cut() -> None:
    demo = ("-m", "ubatch_guard.cli", "demo", "--device", "cpu", "--json")
    done = torchrun(2, *demo, "--limit", "12", "--workload", "requests")
    assert done.returncode == 0, done.stderr
    rows = {row["policy"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == ["whole", "unguarded", "vllm", "veto", "reorder"]
    assert rows["reorder"]["wrong"] == rows["veto"]["wrong"] == 0


@pytest.mark.parametrize("end", ["die", "hang"])
def test_the_other_rank_ends_with_an_error(end: str, tmp_path: Path) -> None:
    """Without torchrun's agent, which would end it: a rank has to find out for itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), "reorder", end, "3"],
            env=environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, error = ranks[0].communicate(timeout=120)  # far below the 600 s that the hanging rank sleeps
        assert ranks[0].returncode == 1
        assert "gloo" in error or "Timed out" in error, error
        assert not list(tmp_path.iterdir())
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_cut_is_moved_on_one_rank_alone() -> None:
    config, _ = parallel_workload()
    model = load_model(config)
    make_runner("move", config, model)
    for size in (2, 4):
        with pytest.raises(ValueError, match=f"{size} ranks: a cut can be moved on one alone"):
            make_runner("move", config, model, Ranks(size))


def test_a_single_rank_votes_alone() -> None:
    config = ParallelConfig(num_ubatches=2, dbo_prefill_token_threshold=10, dbo_decode_token_threshold=4)
    vote = coordinate_batch_across_dp
    assert vote(Ranks(), config, 10, True, uniform_decode=False) == (True, True, 10)
    assert vote(Ranks(), config, 10, False, uniform_decode=False) == (False, True, 10)
    assert vote(Ranks(), config, 9, True, uniform_decode=False) == (False, False, 9)
    assert vote(Ranks(), config, 4, True, uniform_decode=True) == (True, True, 4)
    assert vote(Ranks(), ParallelConfig(), 999, True, uniform_decode=False) == (False, False, 999)


def test_pairs_come_back_to_their_tokens() -> None:
    experts = torch.tensor([[2, 0], [1, 2], [2, 1], [0, 2]])
    hidden = torch.arange(8.0).view(4, 2)
    route = ExpertRoute(Ranks(), experts, num_experts=4)
    received = route.dispatch(hidden).received
    rows = route.rows_of_experts()
    assert [sum(part.stop - part.start for part in parts) for parts in rows] == [2, 2, 4, 0]
    computed = torch.empty_like(received)
    for expert, parts in enumerate(rows):
        for part in parts:
            computed[part] = received[part] * 10 + expert
    restored = route.restore(route.combine(computed).received, 2)
    for token in range(4):
        for choice in range(2):
            expected = hidden[token] * 10 + experts[token, choice]
            assert torch.equal(restored[token, choice], expected)
