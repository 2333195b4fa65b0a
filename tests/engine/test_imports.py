"""The engine's modules import only what stands above them in the package's own list, and never vLLM."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import ubatch_guard.engine

PACKAGE = Path(ubatch_guard.engine.__file__).parent
HEAVY = {"torch", "safetensors"}


def listed() -> list[str]:
    return re.findall(r"^``(\w+)`` ", ubatch_guard.engine.__doc__ or "", re.MULTILINE)


def imports(module: Path) -> tuple[set[str], set[str]]:
    """Modules of the engine that a module imports, wherever in its text; and all other packages."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            inside |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            outside.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Import):
            outside |= {alias.name.partition(".")[0] for alias in node.names}
    return inside, outside


def test_the_list_is_complete() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert len(modules) > 15
    assert sorted(listed()) == sorted(modules)


def upward(names: list[str]) -> list[tuple[str, str]]:
    """Imports against the order of ``names``, as (importer, imported)."""
    return [
        (name, other)
        for place, name in enumerate(names)
        for other in sorted(imports(PACKAGE / f"{name}.py")[0] - set(names[:place]))
    ]


def test_imports_go_one_way() -> None:
    assert upward(listed()) == []
    assert ("runner", "sampler") in upward(listed()[::-1])  # a list in the wrong order would be noticed


def test_vllm_is_not_imported() -> None:
    for name in listed():
        assert "vllm" not in imports(PACKAGE / f"{name}.py")[1], name


def test_every_file_reads_in_one_sitting() -> None:
    for path in PACKAGE.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 350, path.name


def test_declaring_the_demo_loads_no_torch() -> None:
    program = (
        "import argparse, sys; from ubatch_guard.engine import demo; "
        "demo.add_arguments(argparse.ArgumentParser()); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "ubatch_guard.engine.demo" in loaded
    assert not loaded & HEAVY
