"""What a guard says: log lines, each reason once, and its counts now and then."""

from __future__ import annotations

import logging
import time

from ubatch_guard._core import __version__
from ubatch_guard.counters import Counters, GuardExport, Info
from ubatch_guard.log import say

_EXPORT_NS = 1_000_000_000


class Report:
    """The log and the metrics of one guard. Nothing here raises: what only reports must not touch a vote.

    Args:
        mode: The guard's policy.
        runner: What kind of runner it guards.
        counters: What is reported.
        log_interval: Seconds between two log lines with the counters; 0: none.
    """

    def __init__(self, mode: str, runner: str, counters: Counters, log_interval: float) -> None:
        self._mode = mode
        self._runner = runner
        self._counters = counters
        self._logged: set[str] = set()
        self._export = GuardExport()
        self._next_export = 0
        self._log_ns = int(log_interval * 1e9)
        self._next_log = time.monotonic_ns() + self._log_ns
        self.guarded = "no, it observes" if mode == "observe" else "yes"

    @property
    def guarded(self) -> str:
        """Whether the steps are guarded, or why not, as the metrics say it."""
        return self._guarded

    @guarded.setter
    def guarded(self, guarded: str) -> None:
        self._guarded = guarded
        self._export.info = Info(__version__, self._mode, self._runner, guarded)

    def once(self, key: str, message: str, level: int = logging.WARNING) -> None:
        """Log ``message``, but for a ``key`` that was logged before."""
        if key not in self._logged:
            self._logged.add(key)
            say(f"ubatch-guard: {message}", level)

    def retire(self) -> None:
        """Export the counts for the last time, and that this guard is no more."""
        self._export.info = None
        self._export(self._counters)

    def now_and_then(self) -> None:
        """Export and log the counts if it is time to."""
        now = time.monotonic_ns()
        if now >= self._next_export:
            self._next_export = now + _EXPORT_NS
            self._export(self._counters)
        if self._log_ns and now >= self._next_log:
            self._next_log = now + self._log_ns
            say(f"ubatch-guard ({self._mode}): {self._counters.line()}", logging.INFO)
