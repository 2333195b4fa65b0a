"""The house's rules: imports go one way, heavy packages stay in their rooms, the README runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "ubatch_guard"

# From the ground up; a module imports from floors below its own, a package also from itself.
FLOORS = [
    {"step", "log"},
    {"_core", "eligibility"},
    {"cuts"},
    {"reference", "guard", "kv_cache_groups", "settings"},
    {"counters", "trace"},
    {"runner", "report"},
    {"vllm"},
    {"runner_mixin"},
    {"cases", "hook_cases"},
    {"engine", "bench"},
    {"simulate"},
    {"commands"},
    {"cli"},
]
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}
# vLLM's own classes are driven with tensors (doctor --prove).
ROOMS_OF = {
    "torch": {"engine", "vllm"},
    "safetensors": {"engine"},
    "vllm": {"vllm"},
    "plotly": {"report"},
    "transformers": set(),
}


def _modules() -> list[tuple[str, ast.Module]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":
            found.append((room, ast.parse(path.read_text(), str(path))))
    assert len(found) > 20, "the package was not found"
    return found


def _imports(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:  # a relative one stays in its room
            assert node.module is not None
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_imports_go_one_way() -> None:
    wrong = []
    for room, tree in _modules():
        for name in _imports(tree):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package == "ubatch_guard" and other in FLOOR and other != room and FLOOR[other] >= FLOOR[room]:
                wrong.append(f"{room} imports {name}")
    assert not wrong


def test_every_module_has_a_floor() -> None:
    assert {room for room, _ in _modules()} | {"_core"} == set(FLOOR)


def test_heavy_packages_stay_in_their_rooms() -> None:
    wrong = [
        f"{room} imports {name}"
        for room, tree in _modules()
        for name in _imports(tree)
        if room not in ROOMS_OF.get(name.split(".")[0], {room})
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module", ["ubatch_guard", "ubatch_guard.cli", "ubatch_guard.runner_mixin", "ubatch_guard.vllm.plugin"]
)
def test_a_light_import_loads_nothing_heavy(module: str) -> None:
    heavy = ["torch", "vllm", "transformers", "rich", "plotly", "prometheus_client", "zstandard"]
    code = f"import {module}, sys; print(*[name for name in {heavy!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_one_rust_file_knows_python() -> None:
    sources = sorted((ROOT / "rust").glob("*.rs"))
    assert len(sources) > 5
    knowing = [path.name for path in sources if re.search(r"\b(pyo3|numpy)\b", path.read_text())]
    # lib.rs has the name of the feature alone.
    assert [name for name in knowing if name != "lib.rs"] == ["py.rs"]


def test_type_checkers_see_the_package_as_typed(tmp_path: Path) -> None:
    use = tmp_path / "use.py"
    use.write_text("import ubatch_guard\nreveal_type(ubatch_guard.feasible_cuts(4).first)\n")
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}", str(use)]
    done = subprocess.run(mypy, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert 'Revealed type is "int"' in done.stdout.replace("builtins.", ""), done.stdout


def test_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "first=1, last=79" in done.stdout
        assert "permutation=(1, 0)" in done.stdout


def test_the_readme_shows_what_its_commands_print() -> None:
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        command, shown = re.findall(r"^\$ (ubatch-guard .*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)[-1]
        run = [sys.executable, "-m", "ubatch_guard.cli", *command.split()[1:]]
        printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        assert len(printed.splitlines()) > 5
        # Times are those of the machine.
        timed = r"took \d+ us \(median\) and \d+ us"
        assert re.sub(timed, "", printed) == re.sub(timed, "", shown)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("own_cut", "instead of 56, cut at 80\n"),
        ("from_a_log", "128 steps, 1 would be cut, 1 unsafe, 1 kept split\n"),
    ],
)
def test_the_examples_run(name: str, printed: str) -> None:
    run = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.endswith(printed)


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {"own_cut", "from_a_log"}
