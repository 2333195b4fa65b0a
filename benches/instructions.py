"""Count the instructions of a check under valgrind: a figure that no noise touches.

Run as a program under callgrind, this asks each step once to warm up and once to count; callgrind counts only
what runs within the methods asked, and writes its count away whenever ``Mirror.nbytes`` is read.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ubatch_guard.bench import Subjects
from ubatch_guard.cases import step_by_name

SUBJECTS = ("mirrored", "stateless", "unsafe_cuts", "order")
"""Of :class:`ubatch_guard.bench.Subjects`."""

_ONLY_QUESTIONS = tuple(
    f"--toggle-collect=*__pymethod_{method}__*" for method in ("is_safe", "unsafe_cuts", "order")
)


def missing() -> str | None:
    """Why nothing can be counted here, or None."""
    return None if shutil.which("valgrind") else "valgrind is not installed (Debian: apt install valgrind)"


def totals(program: Sequence[str], reads: int, options: Sequence[str] = ()) -> list[int]:
    """Instructions of a program before each of its ``reads`` reads of ``Mirror.nbytes``, since the last."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        callgrind = ("valgrind", "--tool=callgrind", "--dump-before=*__pymethod_get_nbytes__*", *options)
        command = (*callgrind, f"--callgrind-out-file={out}", *program)
        subprocess.run(command, check=True, capture_output=True, text=True)
        counts = []
        for index in range(1, reads + 1):
            total = re.search(r"^totals: (\d+)$", Path(f"{out}.{index}").read_text(), re.MULTILINE)
            counts.append(int(total[1]) if total else 0)
    return counts


def count(names: Sequence[str]) -> dict[tuple[str, str], int]:
    """Instructions of one question, by case name and subject."""
    keys = [(name, subject) for name in names for subject in SUBJECTS]
    counts = totals((sys.executable, __file__, *names), 2 * len(keys), _ONLY_QUESTIONS)
    # Every other one is the first call, which takes its scratch from the heap.
    return dict(zip(keys, counts[1::2], strict=True))


def _program(names: Sequence[str]) -> None:
    for name in names:
        subjects = Subjects(step_by_name(name))
        for subject in SUBJECTS:
            for _ in ("warm up", "count"):
                getattr(subjects, subject)()
                _ = subjects.mirror.nbytes


if __name__ == "__main__":
    _program(sys.argv[1:])
