"""``ubatch-guard demo``: its rows, and its exit status."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ubatch_guard.engine import comparison, demo
from ubatch_guard.engine.config import EngineConfig
from ubatch_guard.engine.model import DecoderModel
from ubatch_guard.engine.parallel import Ranks
from ubatch_guard.engine.runner import Runner
from ubatch_guard.engine.workloads import EXCERPT, SYNTHETIC, mooncake

FIELDS = {
    "policy",
    "requests",
    "wrong",
    "steps",
    "eligible",
    "split",
    "vetoed",
    "reordered",
    "unwritten_reads",
}


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args(arguments))


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert run(*arguments, "--json") == 0
    parsed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row.keys() >= FIELDS for row in parsed)
    return {row["policy"]: row for row in parsed}


def check(got: dict[str, dict[str, Any]]) -> None:
    """Check what holds on every workload with a hazard."""
    assert list(got) == ["whole", "unguarded", "vllm", "veto", "reorder", "move"]
    assert len({row["requests"] for row in got.values()}) == 1
    assert len({row["steps"] for row in got.values()}) == 1
    assert got["whole"]["split"] == got["whole"]["unwritten_reads"] == 0
    assert got["unguarded"]["wrong"] > 0
    for row in got.values():
        assert row["eligible"] == (0 if row["policy"] == "whole" else row["split"] + row["vetoed"])
        assert row["wrong"] == 0 or row["unwritten_reads"] > 0
    for policy in ("veto", "reorder", "move"):
        assert got[policy]["wrong"] == got[policy]["unwritten_reads"] == 0
    assert got["veto"]["vetoed"] > 0
    assert got["reorder"]["reordered"] > 0
    assert got["reorder"]["split"] == got["reorder"]["eligible"] > 0
    assert got["move"]["reordered"] == 0
    assert got["move"]["split"] > got["veto"]["split"]


@pytest.mark.parametrize("workload", demo.WORKLOADS)
def test_each_workload(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = rows(capsys, "--workload", workload, "--device", "cpu")
    check(got)
    assert got["vllm"]["wrong"] == 0  # with decodes of one token, vLLM's rule sees these hazards


@pytest.mark.parametrize("workload", ["fewshot", "grpo", "rag"])
def test_vllms_rule_under_an_mla_threshold(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = rows(capsys, "--workload", workload, "--device", "cpu", "--decode-threshold", "512")
    check(got)
    assert got["vllm"]["wrong"] > 0


def test_three_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    check(rows(capsys, "--workload", "fewshot", "--device", "cpu", "--ubatch-size", "3"))


def test_a_guarded_run_that_is_wrong_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with a guard that lets everything through, the demo says so and fails."""

    def no_guard(rule: str, config: EngineConfig, model: DecoderModel, ranks: Ranks | None = None) -> Runner:
        return Runner(config, model, ranks)

    monkeypatch.setattr(comparison, "make_runner", no_guard)
    assert run("--device", "cpu", "--policy", "veto", "--json") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[1])["wrong"] > 0
    assert run("--device", "cpu", "--policy", "vllm", "--json") == 0


def test_the_table_tells_the_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--device", "cpu", "--policy", "unguarded", "--policy", "reorder") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fewshot: 40 requests, cpu, float64"
    assert lines[1].split() == list(comparison.FIELDS)
    assert [line.split()[0] for line in lines[2:5]] == ["whole", "unguarded", "reorder"]
    assert "13 requests read up to 42 blocks each" in lines[5]


def test_without_the_sanitizer_nothing_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    got = rows(capsys, "--device", "cpu", "--policy", "unguarded", "--no-sanitize")
    assert got["unguarded"]["unwritten_reads"] is None
    assert got["unguarded"]["wrong"] > 0


def test_a_request_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(EXCERPT.read_text().splitlines(keepends=True)[:12]))
    got = rows(capsys, "--workload", "requests", str(few), "--device", "cpu", "--policy", "reorder")
    assert got["reorder"]["requests"] == 12
    assert got["reorder"]["wrong"] == 0


def test_bad_input_is_an_error_with_a_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0}\n')
    for arguments in (
        ["--workload", "nothing"],
        ["--workload", "fewshot", "file"],
        ["--workload", "requests", str(tmp_path / "absent.jsonl")],
        ["--workload", "requests", str(bad)],
        ["--model", str(tmp_path)],
        ["--ubatch-size", "0"],
        ["--dtype", "int8"],
    ):
        assert run("--device", "cpu", *arguments) == 2, arguments
        assert capsys.readouterr().err.startswith("ubatch-guard demo: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA or HIP device")
def test_a_device_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--device", "cuda") == 2
    assert "no CUDA or HIP device" in capsys.readouterr().err


def test_workloads_repeat() -> None:
    for make in SYNTHETIC.values():
        assert make(512, 3).requests == make(512, 3).requests
        assert make(512, 3).requests != make(512, 4).requests


def test_mooncake_requests_share_what_their_hash_ids_share(tmp_path: Path) -> None:
    file = tmp_path / "two.jsonl"
    entries = [([0, 1, 2], 1400), ([0, 1, 3], 1500)]
    file.write_text(
        "".join(
            json.dumps({"timestamp": 250, "input_length": length, "output_length": 64, "hash_ids": ids})
            + "\n"
            for ids, length in entries
        )
    )
    first, second = mooncake(file, 512, 0).requests
    assert (len(first.prompt_token_ids), len(second.prompt_token_ids)) == (1400 // 32, 1500 // 32)
    assert first.prompt_token_ids[:32] == second.prompt_token_ids[:32]
    assert first.prompt_token_ids[32:40] != second.prompt_token_ids[32:40]
    assert first.sampling_params.max_tokens == 2
    assert first.arrival_step == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP device")
@pytest.mark.parametrize("workload", demo.WORKLOADS)
def test_each_workload_with_real_streams(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(rows(capsys, "--workload", workload, "--device", "cuda"))
