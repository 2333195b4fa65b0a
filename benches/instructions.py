"""Count instructions under valgrind, of checks and of all hooks of a step: figures that no noise touches.

Run as a program under callgrind, this asks each step once to warm up and once to count. For checks callgrind
counts only what runs within the methods asked, for hooks the interpreter too; it writes its count away
whenever ``Mirror.nbytes`` is read.
"""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ubatch_guard.bench import Subjects
from ubatch_guard.cases import step_by_name
from ubatch_guard.hook_cases import HookSubjects, hook_case

SUBJECTS = ("mirrored", "stateless", "unsafe_cuts", "order")
"""Of :class:`ubatch_guard.bench.Subjects`."""

_HOOKS = "--hooks"
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


def count_hooks(names: Sequence[str]) -> dict[str, float]:
    """Instructions that all hooks add to a step, by case name."""
    counts = totals((sys.executable, __file__, _HOOKS, *names), 3 * len(names))
    steps = {name: len(HookSubjects(hook_case(name)).steps) for name in names}
    return {
        name: (guarded - bare) / steps[name]
        for name, bare, guarded in zip(names, counts[1::3], counts[2::3], strict=True)
    }


def _hooks_program(names: Sequence[str]) -> None:
    # A collection of garbage would fall into one of them by chance.
    gc.disable()
    for name in names:
        subjects = HookSubjects(hook_case(name))
        subjects.check()
        subjects.open()
        subjects.bare()
        for run in (None, subjects.bare, subjects.guarded):
            if run is not None:
                run()
            _ = subjects.guard.mirror.nbytes


def _program(names: Sequence[str]) -> None:
    for name in names:
        subjects = Subjects(step_by_name(name))
        for subject in SUBJECTS:
            for _ in ("warm up", "count"):
                getattr(subjects, subject)()
                _ = subjects.mirror.nbytes


if __name__ == "__main__":
    if sys.argv[1] == _HOOKS:
        _hooks_program(sys.argv[2:])
    else:
        _program(sys.argv[1:])
