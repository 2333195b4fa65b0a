from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import prometheus_client
import pytest

from ubatch_guard.counters import CounterExport, Counters, GuardExport, Info


def test_the_line_has_what_happened() -> None:
    counters = Counters(steps=10, eligible=4, eligible_allowed=3, reordered=1, requests_moved=2)
    counters.unsafe["short"] += 2
    counters.vetoed["unsafe"] += 1
    counters.verdicts["veto", "allow"] += 1
    counters.verdicts["allow", "allow"] += 3
    line = counters.line()
    assert "10 steps, 4 eligible (3 allowed), unsafe: 2 short, 1 reordered (2 requests moved)" in line
    assert "vetoed: 1 unsafe, 0 really cut, vLLM disagreed in 1 of 4" in line


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


def test_every_count_reaches_the_log_and_prometheus() -> None:
    counters = Counters()
    for number, name in enumerate(field.name for field in fields(Counters)):
        if isinstance(getattr(counters, name), int):
            setattr(counters, name, 1000 + number)
    registry = prometheus_client.CollectorRegistry()
    GuardExport(make=lambda: CounterExport(registry))(counters)
    values = {sample.value for metric in registry.collect() for sample in metric.samples}
    for name in (
        "steps",
        "cut",
        "unasked",
        "demoted_requests",
        "demoted_tokens",
        "verified",
        "verify_findings",
    ):
        assert getattr(counters, name) in values, name
        assert str(getattr(counters, name)) in counters.line(), name
    assert registry.get_sample_value("ubatch_guard_cut_steps_total") == counters.cut
    assert registry.get_sample_value("ubatch_guard_trace_ends_total") == counters.trace_ended


def test_the_info_says_what_a_guard_is_now() -> None:
    registry = prometheus_client.CollectorRegistry()
    export = GuardExport(Info("1.0", "reorder", "v1", "yes"), lambda: CounterExport(registry))

    def said(**labels: str) -> float | None:
        return registry.get_sample_value("ubatch_guard_info", {"version": "1.0", "runner": "v1", **labels})

    export(Counters())
    assert said(mode="reorder", guarded="yes") == 1
    export.info = Info("1.0", "veto", "v1", "yes")
    export(Counters())
    assert (said(mode="reorder", guarded="yes"), said(mode="veto", guarded="yes")) == (0, 1)
    export.info = None
    export(Counters())
    assert (said(mode="reorder", guarded="yes"), said(mode="veto", guarded="yes")) == (0, 0)


def test_metrics_that_cannot_be_made_cost_one_line(caplog: pytest.LogCaptureFixture) -> None:
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Counter("ubatch_guard_steps", "somebody else's", registry=registry)
    asked = 0

    def make() -> CounterExport:
        nonlocal asked
        asked += 1
        return CounterExport(registry)

    export = GuardExport(make=make)
    for steps in range(3):
        export(Counters(steps=steps))
    assert asked == len(caplog.records) == 1
    assert "ubatch_guard_steps" in caplog.text
    registry.unregister(theirs)
    CounterExport(registry)  # nothing of the failed attempt is in the way


def test_metrics_that_break_cost_one_line(caplog: pytest.LogCaptureFixture) -> None:
    made = CounterExport(prometheus_client.CollectorRegistry())
    export = GuardExport(make=lambda: made)
    export(Counters(steps=1))
    made._metrics.clear()
    for _ in range(3):
        export(Counters(steps=2))
    assert len(caplog.records) == 1
    assert "any more" in caplog.text


def test_a_folder_that_is_missing_costs_one_line(tmp_path: Path) -> None:
    """In a process of its own: prometheus_client looks for the folder when it is imported."""
    code = (
        "from ubatch_guard.counters import Counters, GuardExport, default_export\n"
        "import logging; logging.basicConfig()\n"
        "for export in (GuardExport(), GuardExport()):\n"
        "    for steps in range(3): export(Counters(steps=steps))\n"
        "assert default_export() is None\n"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "nowhere")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stderr.count("\n") == done.stderr.count("no metrics are exported") == 1


def test_without_prometheus_client_nothing_is_said() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from ubatch_guard.counters import Counters, GuardExport\n"
        "GuardExport()(Counters(steps=1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_workers_reach_the_server_in_multiprocess_mode(tmp_path: Path) -> None:
    """Two worker processes count; a third, which serves, sees the sum."""
    worker = (
        "from ubatch_guard.counters import Counters, GuardExport, Info\n"
        "GuardExport(Info('1.0', 'reorder', 'v2', 'yes'))(Counters(steps={steps}))\n"
    )
    server = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())\n"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
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
    infos = [line for line in said.splitlines() if line.startswith("ubatch_guard_info{")]
    assert len(infos) == 2, "a series per worker"
    assert all('runner="v2"' in line and line.endswith(" 1.0") for line in infos)
