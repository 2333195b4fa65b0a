"""A short soak, and that it sees a broken answer and memory that grows."""

from __future__ import annotations

from typing import Any

import pytest
import soak

from ubatch_guard.runner.guard import RunnerGuard
from ubatch_guard.step import Policy


def test_a_short_soak_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--steps", "1500", "--hook-steps", "2000", "--sample", "50"]) == 0
    said = capsys.readouterr().out
    assert said.count("too short for memory") == 5
    assert "all right" in said


def test_it_meets_hazards() -> None:
    counts = soak.core(steps=1000, seed=1)
    assert counts["unsafe"] > 20, counts
    for shape in ("v1", "v2"):
        counts = soak.hooks(shape, Policy.REORDER, steps=1000, seed=1)
        assert counts["reordered"] > 10, counts


class _Mirror:
    """A mirror with one answer that is not its own."""

    def __init__(self, groups: Any) -> None:
        self._right = soak_mirror(groups)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def __len__(self) -> int:
        return len(self._right)


soak_mirror = soak.Mirror


class _AlwaysSafe(_Mirror):
    def is_safe(self, *_: Any) -> bool:
        return True


class _NoOrder(_Mirror):
    def order(self, slots: Any, *_: Any) -> Any:
        return list(range(len(slots))), [], []


class _LosesBlocks(_Mirror):
    def append_each(self, names: Any, rows: Any) -> None:
        self._right.append_each(names, [None] * len(names))


@pytest.mark.parametrize("broken", [_AlwaysSafe, _NoOrder, _LosesBlocks])
def test_a_broken_core_is_seen(
    broken: type[_Mirror], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "Mirror", broken)
    if broken is _LosesBlocks:
        # The mirror itself notices that a row is too short.
        with pytest.raises(ValueError, match="columns"):
            soak.core(steps=500, seed=0, sample=5)
        return
    assert soak.main(["--steps", "500", "--hook-steps", "0", "--sample", "5"]) == 1
    assert "WRONG: core" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["v1", "v2"])
@pytest.mark.parametrize("policy", [Policy.REORDER, Policy.VETO])
def test_a_broken_vote_is_seen(shape: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunnerGuard, "_is_allowed", lambda self, batch: True)
    monkeypatch.setattr(RunnerGuard, "plan", lambda self, batch: None)
    with pytest.raises(soak.WrongError):
        soak.hooks(shape, policy, steps=2000, seed=0, sample=2)


def test_memory_that_grows_is_seen() -> None:
    steady = [(number * 1000, 50_000 + number % 7) for number in range(1, 1000)]
    assert soak.is_flat(steady)
    grown = [(steps, kb + steps // 200) for steps, kb in steady]
    assert soak.slope_of(grown) == pytest.approx(500, abs=1)
    assert not soak.is_flat(grown)
    watch = soak.Watch("test", 1000, sizes=grown)
    with pytest.raises(soak.WrongError, match="memory grows"):
        watch.end()
