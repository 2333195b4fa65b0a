"""Which of vLLM's model runners a test file needs: ``runners.use("v2")`` comes before anything of vLLM."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

FILES = {"v1": "gpu_model_runner.py", "v2": "gpu/model_runner.py"}


def package() -> Path:
    """The folder of the vLLM that is installed; without one, the test file is skipped."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM on a CPU: make test-vllm", allow_module_level=True)
    return Path(spec.origin).parent


def present() -> list[str]:
    """The generations of model runners that the installed vLLM has."""
    return [runner for runner, file in FILES.items() if (package() / "v1" / "worker" / file).exists()]


def use(runner: str) -> None:
    """Have the engines of this process use ``runner``, ``v1`` or ``v2``, or skip the test file."""
    if runner not in present():
        pytest.skip(f"this vLLM has no Model Runner {runner.upper()}", allow_module_level=True)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
