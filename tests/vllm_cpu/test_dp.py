"""Data-parallel ranks in processes of their own: a "no" reaches all of them, and none is left hanging."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import runners

RUNNER = runners.present()[0]
runners.use(RUNNER)

# The processes started here inherit the environment that this sets.
import cpu_engine  # noqa: F401
from tiny_models import save_tiny_model

TIMEOUT = 540
"""Seconds for a rank to start its engine and go through all scenarios; a hang is a failure."""


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each rank says, in order of rank."""
    ranks = request.param
    model = save_tiny_model(tmp_path_factory.mktemp("llama"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(Path(__file__).with_name("dp_rank.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, RUNNER, str(model), str(rank), str(ranks), str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks
    return [json.loads(text.strip().splitlines()[-1]) for text in said]


def test_unguarded_ranks_answer_wrongly(results: list[dict]) -> None:
    """The control: vLLM's own guard alone, readers as short as decodes."""
    assert all(rank["unguarded"]["wrong"] > 0 for rank in results)
    assert all(rank["unguarded"]["split"] > 0 for rank in results)


def test_reordered_ranks_stay_split(results: list[dict]) -> None:
    for rank in results:
        outcome = rank["reorder"]
        assert outcome["wrong"] == 0
        assert outcome["split"] == 1
        assert outcome["reordered"] == 1


@pytest.mark.parametrize(
    ("scenario", "reason"), [("one vetoes", "unsafe"), ("one raises", "runtime"), ("one idle", None)]
)
def test_one_no_is_a_no_for_all(results: list[dict], scenario: str, reason: str | None) -> None:
    for rank in results:
        assert rank[scenario]["split"] == 0
        assert rank[scenario]["wrong"] == 0
    if reason is not None:
        assert results[0][scenario]["vetoed"][reason] >= 1
        assert all(not rank[scenario]["vetoed"] for rank in results[1:])
