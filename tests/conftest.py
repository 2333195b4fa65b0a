"""What all tests have: Hypothesis without a time limit, and the counting of instructions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# For an example: machines are shared, and slow is not wrong.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def instructions() -> ModuleType:
    """``benches/instructions.py``."""
    path = Path(__file__).parent.parent / "benches" / "instructions.py"
    spec = importlib.util.spec_from_file_location("instructions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
