"""Time the audit of the committed traces with the Rust core against the audit with the Python reference.

Prints a line a trace and the ratio over all; fails when the core needs a tenth of the time or more.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ubatch_guard.trace.audit import AuditOptions, audit_trace

TRACES = sorted((Path(__file__).parent.parent / "tests" / "traces").glob("*.jsonl.gz"))
GOAL = 10


def seconds(path: Path, *, reference: bool, runs: int) -> float:
    """Shortest processor time of an audit, reading the file included; other processes do not count."""
    times = []
    for _ in range(runs):
        began = time.process_time()
        audit_trace(path, AuditOptions(reference=reference))
        times.append(time.process_time() - began)
    return min(times)


def main() -> int:
    """Print the times; 1 where the goal is missed."""
    core_total = reference_total = 0.0
    for path in TRACES:
        core = seconds(path, reference=False, runs=3)
        reference = seconds(path, reference=True, runs=1)
        core_total += core
        reference_total += reference
        print(f"{path.name:42} core {core:7.3f} s   reference {reference:7.3f} s   {reference / core:6.1f}x")
    ratio = reference_total / core_total
    print(f"{'all':42} core {core_total:7.3f} s   reference {reference_total:7.3f} s   {ratio:6.1f}x")
    return 0 if ratio > GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
