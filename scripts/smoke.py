"""Use an installed ubatch-guard, in an environment with numpy and nothing else."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import numpy as np

import ubatch_guard
from ubatch_guard import Guard, KVCacheGroup, Step

others = {found.name.lower() for found in distributions()} - {"numpy", "pip", "setuptools", "ubatch-guard"}
assert not others, f"these are installed too: {others}"
assert ubatch_guard.__version__ == version("ubatch-guard")
assert Path(ubatch_guard.__file__).is_relative_to(sys.prefix), ubatch_guard.__file__

group = KVCacheGroup(tokens_per_column=16, num_blocks=64)
rows = np.array([[1, 2, 3, 4, 9, 0], [1, 2, 3, 4, 5, 6]], np.int32)
step = Step(np.array([64, 0]), np.array([16, 96]), (rows,), (group,))
verdict = Guard([group], policy="reorder").decide(step)
assert verdict.order is not None
assert verdict.order.permutation == (1, 0)

command = Path(sys.prefix, "bin", "ubatch-guard")
shown = subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
assert "audit" in shown
python = sys.version.split()[0]
print(f"ubatch-guard {ubatch_guard.__version__} on Python {python} with numpy {np.__version__}: right")
