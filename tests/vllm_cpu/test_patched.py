"""vLLM with contrib's patch, without the package: running requests first, then the new ones as scheduled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import runners

if runners.present() != ["v2"]:
    pytest.skip("the patch is for vLLM 0.34", allow_module_level=True)

# The processes started here inherit the environment that this sets.
import cpu_engine  # noqa: F401
from outcomes import Recorder
from tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the patched copy of the package ``vllm``."""
    folder = tmp_path_factory.mktemp("patched")
    subprocess.run([ROOT / "scripts" / "patched_vllm.sh", folder, sys.executable], check=True, timeout=300)
    return folder


def test_the_scheduler_s_order_is_right_without_a_guard(
    patched: Path, tmp_path: Path, record_outcome: Recorder
) -> None:
    """That the same cases are wrong without the patch is shown by the other files, case by case."""
    path = f"{patched}{os.pathsep}{runners.package().parent}"
    result = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).with_name("patched_run.py")),
            str(save_tiny_model(tmp_path / "llama")),
        ],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    said = json.loads(result.stdout.strip().splitlines()[-1])
    assert Path(said["vllm"]).is_relative_to(patched)
    for case in said["cases"]:
        assert case["wrong"] == 0, case
        assert case["split"] == case["eligible"] > 0, case
    requests, split = (sum(case[key] for case in said["cases"]) for key in ("requests", "split"))
    record_outcome.note(
        "0.34.0",
        f"With the scheduler's order (`contrib/vllm-0.34`) and without this package: 0 of {requests} "
        f"requests wrong, {split} of {split} steps cut.",
    )
