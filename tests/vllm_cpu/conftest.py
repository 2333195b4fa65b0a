"""Makes the modules beside this file importable, and keeps what the cases measured for the table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import outcomes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def record_outcome() -> Iterator[outcomes.Recorder]:
    recorder = outcomes.Recorder()
    yield recorder
    recorder.save()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tables = [
        outcomes.as_markdown(outcomes.Recorder.measured),
        outcomes.poison_as_markdown(outcomes.Recorder.poison),
    ]
    if any(tables) or outcomes.Recorder.notes:
        terminalreporter.section("outcomes")
        terminalreporter.write_line("\n".join([*(text for _, text in outcomes.Recorder.notes), *tables]))
