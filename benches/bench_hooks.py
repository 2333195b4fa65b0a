"""All hooks of a step together, around a runner whose own methods do nothing."""

from __future__ import annotations

from ubatch_guard.bench import measure_hooks
from ubatch_guard.hook_cases import HOOK_CASES, HookSubjects, hook_case

NAMES = tuple(case.name for case in HOOK_CASES)
ROUNDS = 7
Results = dict[str, tuple[float, float]]


class Hooks:
    """So many steps in a row; the time is that of all of them."""

    params = NAMES
    param_names = ("case",)
    version = "1"
    # Once a sample: the rows grow.
    number = 1
    timeout = 300

    def setup(self, name: str) -> None:
        self.subjects = HookSubjects(hook_case(name))
        self.subjects.open()

    def time_hooks(self, name: str) -> None:
        self.subjects.guarded()


class Added:
    """What the hooks add to one step, against what vLLM does about it itself."""

    params = NAMES
    param_names = ("case",)
    unit = "times vLLM's own"
    version = "1"
    timeout = 300

    def setup_cache(self) -> Results:
        results = (measure_hooks(case, ROUNDS) for case in HOOK_CASES)
        return {result.case: (result.hooks_us, result.ratio) for result in results}

    def track_ratio(self, results: Results, name: str) -> float:
        return results[name][1]
