"""Which vLLM releases are guarded: their hook points, and the few-shot burst on the older ones."""

from __future__ import annotations

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

from ubatch_guard.vllm.generation import HookPoints, read_hook_points
from ubatch_guard.vllm.generations import GENERATIONS

ROOT = Path(__file__).parents[2]

RELEASES = ("0.27.1", "0.30.0", "0.32.0", "0.33.0", "0.34.0")
VOTES = {
    "0.27.1": {"v1": "_determine_batch_execution_and_padding(allow_microbatching=)", "v2": None},
    "0.30.0": {"v1": "_allow_microbatching", "v2": "ubatch_runner"},
    "0.32.0": {"v1": "_allow_microbatching", "v2": "ubatch_runner"},
    "0.33.0": {"v1": "_allow_microbatching", "v2": "ubatch_runner"},
    "0.34.0": {"v2": "ubatch_runner"},
}
CHECKED = {
    "0.27.1": "hook points; V1 run: the few-shot burst under three thresholds",
    "0.30.0": "hook points; V1 run: the few-shot burst under three thresholds",
    "0.32.0": "hook points; V1 and V2 run",
    "0.33.0": "hook points; V1 and V2 run (`make test-vllm-previous`)",
    "0.34.0": "hook points; V2 run: the whole suite",
}


def folder(release: str) -> Path:
    """What `fetch_vllm_releases.sh` has fetched."""
    return ROOT / f".cache/vllm-{release}"


def hook_points(release: str) -> dict[str, HookPoints]:
    found = [read_hook_points(generation, folder(release) / "vllm") for generation in GENERATIONS]
    return {points.runner: points for points in found if points is not None}


def as_markdown() -> str:
    lines = ["| release | V1 votes by | V2 votes by | checked |", "| --- | --- | --- | --- |"]
    for release in RELEASES:
        points = hook_points(release)
        votes = []
        for runner in ("v1", "v2"):
            if runner not in points:
                votes.append("is not there")
            else:
                votes.append(f"`{vote}`" if (vote := points[runner].vote) else "does not microbatch")
        lines.append(f"| {release} | {' | '.join(votes)} | {CHECKED[release]} |")
    return "\n".join(lines)


@pytest.mark.parametrize("release", RELEASES)
def test_hook_points(release: str) -> None:
    points = hook_points(release)
    assert {runner: found.vote for runner, found in points.items()} == VOTES[release]
    assert not any(found.missing for found in points.values()), points


def test_the_readme_has_the_table() -> None:
    assert as_markdown() in (ROOT / "README.md").read_text(), f"README.md lacks\n{as_markdown()}"


@pytest.mark.parametrize("release", ["0.27.1", "0.30.0"])
def test_an_older_release_runs_guarded(release: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).with_name("release_run.py")),
            str(save_tiny_model(tmp_path / "llama")),
        ],
        env={**os.environ, "PYTHONPATH": str(folder(release))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    said = json.loads(result.stdout.strip().splitlines()[-1])
    assert said["version"] == release
    # The control: this release alone answers wrongly.
    assert sum(case["alone"] for case in said["cases"]) >= 14
    for case in said["cases"]:
        assert case["veto"] == case["reorder"] == case["differences"] == 0
        assert case["split"] == case["eligible"] == 1
