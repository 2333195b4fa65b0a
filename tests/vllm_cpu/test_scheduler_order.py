"""The scheduler's order is a safe order (docs/scheduler-order.md): a contract with each vLLM that is here.

Random histories on the release's own scheduler, without a model. A release that lists requests in another
order than it admits them on blocks, or lets running requests read what the step makes, fails here.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
STEPS = 1500
WHAT = ("plain", "failing_loads")


def _releases() -> dict[str, Path]:
    """By version or ``installed``, the folders that hold a package ``vllm``."""
    found = {path.parent.name.removeprefix("vllm-"): path.parent for path in ROOT.glob(".cache/vllm-*/vllm")}
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parents[1]
        if folder not in found.values():
            found["installed"] = folder
    return found


if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM on a CPU: make test-vllm", allow_module_level=True)
RELEASES = _releases()


def _environment(folder: Path) -> dict[str, str]:
    # Without what is on the path already: a release tells its device by its own distribution.
    path = os.pathsep.join([str(folder), str(ROOT / "python")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


@functools.cache
def _histories(folder: Path) -> dict[str, dict[str, Any]]:
    """Without and with loads that fail, in one process: most of the time goes into importing vLLM."""
    if not (folder / "vllm" / "__init__.py").exists():
        pytest.skip(f"not available: {folder} has some of vLLM's sources only")
    program = f"""
import json, scheduler_fuzz
print(json.dumps({{what: scheduler_fuzz.run(0, {STEPS}, what == "failing_loads") for what in {WHAT}}}))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=Path(__file__).parent,
        env=_environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for result in found.values():
        assert result["steps"] == STEPS, result["stopped"]
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_running_requests_first_and_new_ones_as_scheduled_is_safe(release: str) -> None:
    found = _histories(RELEASES[release])["plain"]
    first = found["first"]
    assert not found["stopped"], first
    assert found["running_reader_steps"] == 0, first["running_reader_steps"]
    assert found["unsafe_steps"]["as_scheduled"] == 0, first["as_scheduled"]
    assert found["unsafe_steps"]["running_first"] == 0, first["running_first"]
    assert found["written_twice_steps"] == 0, first["written_twice_steps"]
    # vLLM's fault of priority preemption shows once in some 70,000 steps; not in these.
    assert found["wrong_whole_steps"] == 0, first["wrong_whole_steps"]
    # The control: these histories hold hazards, and the order in which vLLM 0.34 cuts is seen to be unsafe.
    assert found["sharing_steps"] >= 10
    assert found["unsafe_steps"]["vllm"] >= 5
    assert min(found[name] for name in ("preempted", "drafted", "loads")) > 0


@pytest.mark.parametrize("release", RELEASES)
def test_failed_loads_are_where_the_order_ends(release: str) -> None:
    """A running request that is set back computes blocks on which another running one counts."""
    found = _histories(RELEASES[release])["failing_loads"]
    assert found["set_back"] > 0
    assert found["running_reader_steps"] > 0
    assert found["unsafe_steps"]["running_first"] > 0
    assert found["unsafe_steps"]["as_scheduled"] == 0


def test_the_patch_makes_vllms_own_order_safe(tmp_path: Path) -> None:
    folder = RELEASES.get("0.34.0") or RELEASES.get("installed")
    target = Path("vllm/v1/worker/gpu/model_runner.py")
    if folder is None or _version(folder) != "0.34.0":
        pytest.skip("not available: vLLM 0.34.0 is not here")
    before = (folder / target).read_bytes()
    subprocess.run(
        [ROOT / "scripts" / "patched_vllm.sh", tmp_path / "patched", sys.executable],
        env=_environment(folder),
        check=True,
    )
    assert (folder / target).read_bytes() == before
    assert (tmp_path / "patched" / target).read_bytes() != before
    found = _histories(tmp_path / "patched")["plain"]
    assert found["sharing_steps"] >= 10
    assert found["unsafe_steps"]["vllm"] == 0, found["first"]["vllm"]


def _version(folder: Path) -> str:
    said = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; print(m.version('vllm'))"],
        env=_environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip()
