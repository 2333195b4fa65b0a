"""The plugin on vLLM's own classes: found, lazy, idempotent, undoable, loud; and a guarded subclass."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import runners

pytestmark = pytest.mark.vllm
runners.package()

# The processes started here inherit the environment that this sets.
import cpu_engine  # noqa: F401
from tiny_models import save_tiny_model

from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy
from ubatch_guard.vllm import plugin
from ubatch_guard.vllm.attention_backends import backends_in_sources
from ubatch_guard.vllm.generations import GENERATIONS

SETTINGS = Settings(policy=Policy.REORDER)
PRESENT = [generation for generation in GENERATIONS if generation.name in runners.present()]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def classes() -> Iterator[dict[str, type]]:
    """vLLM's model runner classes, without hooks before and after."""
    plugin.uninstall()
    found = {g.name: importlib.import_module(g.module).GPUModelRunner for g in PRESENT}
    plugin.uninstall()
    yield found
    plugin.uninstall()


def methods(classes: dict[str, type]) -> dict[tuple[str, str], object]:
    return {
        (generation.name, name): vars(classes[generation.name])[name]
        for generation in PRESENT
        for name in generation.hooks
        if name in vars(classes[generation.name])
    }


def test_vllm_finds_the_entry_point() -> None:
    (entry_point,) = metadata.entry_points(group="vllm.general_plugins", name="ubatch_guard")
    assert entry_point.load() is plugin.register


def test_registering_imports_nothing_of_vllm_and_hooks_on_import() -> None:
    code = (
        "import sys, importlib, inspect\n"
        "from ubatch_guard.vllm import hooking, plugin\n"
        "from ubatch_guard.vllm.generations import GENERATIONS\n"
        "plugin.register(); plugin.register()\n"
        "assert not {'vllm', 'torch'} & set(sys.modules), 'not light'\n"
        f"for generation in GENERATIONS:\n"
        f"    if generation.name in {[g.name for g in PRESENT]!r}:\n"
        "        cls = importlib.import_module(generation.module).GPUModelRunner\n"
        "        for name in generation.hooks:\n"
        "            method = getattr(cls, name)\n"
        "            assert hooking.is_ours(method) and not hooking.is_ours(method.__wrapped__), method\n"
        "            assert 'def ' + name in inspect.getsource(method)\n"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_install_twice_and_undo(classes: dict[str, type]) -> None:
    before = methods(classes)
    plugin.install(SETTINGS)
    once = methods(classes)
    plugin.install(Settings(policy=Policy.VETO))
    assert methods(classes) == once
    assert all(method is not before[name] for name, method in once.items())
    assert all(method.__wrapped__ is before[name] for name, method in once.items())
    assert {cls.ubatch_guard_settings.policy for cls in classes.values()} == {Policy.VETO}
    plugin.uninstall()
    assert methods(classes) == before


def test_off_installs_nothing(classes: dict[str, type]) -> None:
    before = methods(classes)
    plugin.install(Settings(policy=None))
    assert methods(classes) == before


def test_another_wrapper_stays_in_the_chain(
    classes: dict[str, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profiler that wraps a method after us still does after we are gone, and we do nothing then."""
    cls = classes[PRESENT[0].name]
    plugin.install(SETTINGS)
    ours = cls.execute_model

    @functools.wraps(ours)
    def profiled(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(cls, "execute_model", profiled)
    plugin.install(SETTINGS)
    assert cls.execute_model is profiled
    plugin.uninstall()
    assert cls.execute_model is profiled
    assert cls.ubatch_guard_settings.policy is None


def test_a_runner_of_others_is_hooked_around_its_own_override(tmp_path: Path) -> None:
    """Also where it never calls what it overrides; one that is not there, or is no runner, is said loudly."""
    (tmp_path / "theirs.py").write_text(
        f"from {PRESENT[0].module} import GPUModelRunner\n"
        "class TheirRunner(GPUModelRunner):\n"
        "    def execute_model(self, *args, **kwargs): return 'theirs'\n"
        "class NoRunner: pass\n"
    )
    code = (
        "import logging\n"
        "from ubatch_guard.vllm import hooking, plugin\n"
        "plugin.register()\n"
        "said = []\n"
        "plugin.logger.error = lambda *args: said.append(args[0] % args[1:])\n"
        "import theirs\n"
        "assert hooking.is_ours(vars(theirs.TheirRunner)['execute_model'])\n"
        "assert [('NoRunner' in line, 'NOT guarded' in line) for line in said] == [(True, True)], said\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = python(code, PYTHONPATH=path, UBATCH_GUARD_RUNNERS="theirs:TheirRunner, theirs:NoRunner")
    assert result.returncode == 0, result.stderr


def test_malformed_settings_stop_the_process() -> None:
    code = "from vllm.plugins import load_general_plugins; load_general_plugins()"
    assert python(code).returncode == 0
    refused = python(code, UBATCH_GUARD_MODE="recorder")
    assert refused.returncode != 0
    assert "UBATCH_GUARD_MODE is 'recorder'" in refused.stderr


@pytest.mark.parametrize("generation", PRESENT, ids=lambda generation: generation.name)
def test_a_missing_hook_point_is_loud(
    generation, classes: dict[str, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one name more in the contract than this vLLM has: an error in the log, or no start."""
    needs = generation.contract[0]
    lacking = type(needs)(needs.module, needs.cls, (*needs.names, "_a_name_of_tomorrow"))
    module = sys.modules[generation.module]
    changed = [
        type(g)(**{f: getattr(g, f) for f in g.__slots__} | {"contract": (lacking,)})
        if g is generation
        else g
        for g in GENERATIONS
    ]
    monkeypatch.setattr(plugin, "GENERATIONS", tuple(changed))
    before = methods(classes)
    said: list[str] = []
    monkeypatch.setattr(plugin.logger, "error", lambda *args: said.append(args[0] % args[1:]))
    plugin._hook_module(module, SETTINGS)
    (line,) = said
    assert "_a_name_of_tomorrow" in line
    assert "NOT guarded" in line
    assert methods(classes) == before
    with pytest.raises(plugin.HookPointError, match="_a_name_of_tomorrow"):
        plugin._hook_module(module, Settings(policy=Policy.REORDER, strict=True))


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, 0),
        ({"UBATCH_GUARD_MODE": "off"}, 1),
        ({"VLLM_PLUGINS": "other"}, 1),
        ({"UBATCH_GUARD_MODE": "x"}, 1),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 0),
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
    assert found["vllm"].startswith("vllm")
    assert [runner["missing"] for runner in found["runners"]] == [[] for _ in PRESENT]
    assert bool(found["missing"]) == bool(status)
    assert "CPUAttentionBackend" in found["backends"]["reordered"]
    assert "AiterFlashAttentionBackend" in found["backends"]["order_kept"]


def test_doctor_proves_what_it_says() -> None:
    """Steps of this vLLM's own classes, and histories of its scheduler; unguarded, they are not right."""
    arguments = ["doctor", "--json", "--prove"]
    command = f"import sys; from ubatch_guard.cli import main; sys.exit(main({arguments!r}))"
    proven = python(command, UBATCH_GUARD_MODE="reorder")
    assert proven.returncode == 0, proven.stdout + proven.stderr
    found = json.loads(proven.stdout)
    assert [proof["runner"] for proof in found["proofs"]] == [g.name for g in PRESENT for _ in range(2)]
    assert all(proof["right"] and proof["vote"] for proof in found["proofs"])
    hazardous = [proof["order"] for proof in found["proofs"] if proof["step"] == "hazardous"]
    assert hazardous == [["writer", "reader"]] * len(PRESENT)
    assert found["histories"]["unsafe_guarded"] == found["histories"]["refused"] == 0
    assert found["histories"]["unsafe_unguarded"] > 0
    observed = json.loads(python(command, UBATCH_GUARD_MODE="observe").stdout)
    assert not any(proof["right"] for proof in observed["proofs"] if proof["step"] == "hazardous")


def test_few_backends_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    """Of all in this vLLM's sources; a builder that wants three sections is the only reason."""
    reordered, kept = backends_in_sources(runners.package())
    with capsys.disabled():
        print(f"\n{len(reordered)} backends reordered, order kept: {', '.join(kept)}")
    assert kept == ["AiterFlashAttentionBackend"]
    assert {"FlashAttentionBackend", "FlashMLABackend", "TritonMLABackend"} <= set(reordered)


@pytest.mark.parametrize("version", runners.present())
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
