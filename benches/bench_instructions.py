"""Instructions of a check under valgrind, where it is installed."""

from __future__ import annotations

from . import instructions

NAMES = ("gsm8k", "decode256", "mixed256", "context-1024", "context-1048576", "burst-8", "burst-64")


class Instructions:
    """One question about a step."""

    params = (NAMES, instructions.SUBJECTS)
    param_names = ("case", "subject")
    unit = "instructions"
    version = "2"
    timeout = 300

    def setup_cache(self) -> dict[tuple[str, str], int]:
        return {} if instructions.missing() else instructions.count(NAMES)

    def setup(self, counts: dict[tuple[str, str], int], case: str, subject: str) -> None:
        if not counts:
            raise NotImplementedError(instructions.missing())

    def track_check(self, counts: dict[tuple[str, str], int], case: str, subject: str) -> int:
        return counts[case, subject]
