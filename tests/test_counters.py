from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest

from ubatch_guard.counters import CounterExport, Counters


def test_the_line_has_what_happened() -> None:
    counters = Counters(steps=10, eligible=4, eligible_allowed=3, reordered=1, requests_moved=2)
    counters.unsafe["short"] += 2
    counters.vetoed["unsafe"] += 1
    counters.verdicts["veto", "allow"] += 1
    counters.verdicts["allow", "allow"] += 3
    line = counters.line()
    assert "10 steps, 4 eligible (3 allowed), unsafe: 2 short, 1 reordered (2 requests moved)" in line
    assert "vetoed: 1 unsafe, vLLM disagreed in 1 of 4" in line


def test_prometheus_gets_the_gain_once() -> None:
    registry = prometheus_client.CollectorRegistry()
    export = CounterExport(registry)
    counters, exported = Counters(steps=5), {}
    counters.vetoed["no_order"] += 1
    export.export(counters, exported)
    export.export(counters, exported)
    counters.steps += 2
    counters.check_ns += 3_000_000_000
    export.export(counters, exported)
    assert registry.get_sample_value("ubatch_guard_steps_total") == 7
    assert registry.get_sample_value("ubatch_guard_vetoed_steps_total", {"reason": "no_order"}) == 1
    assert registry.get_sample_value("ubatch_guard_check_seconds_total") == 3


def test_two_guards_of_a_process_add_up() -> None:
    registry = prometheus_client.CollectorRegistry()
    export = CounterExport(registry)
    for steps in (3, 4):
        export.export(Counters(steps=steps), {})
    assert registry.get_sample_value("ubatch_guard_steps_total") == 7


def test_a_second_set_of_the_same_names_is_refused() -> None:
    registry = prometheus_client.CollectorRegistry()
    CounterExport(registry)
    with pytest.raises(ValueError, match="ubatch_guard_steps"):
        CounterExport(registry)


def test_workers_reach_the_server_in_multiprocess_mode(tmp_path: Path) -> None:
    """Two worker processes count; a third, which serves, sees the sum."""
    worker = (
        "from ubatch_guard.counters import Counters, default_export\n"
        "default_export().export(Counters(steps={steps}), {{}})\n"
    )
    server = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())\n"
    )
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PATH": ""}
    for steps in (3, 4):
        code = worker.format(steps=steps)
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    said = subprocess.run(
        [sys.executable, "-c", server],
        env=environment,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    ).stdout
    assert "ubatch_guard_steps_total 7.0" in said
