"""A short run of the trace fuzzer, and that it finds what is wrong."""

from __future__ import annotations

import fuzz_traces
import pytest

from ubatch_guard.trace import Changes, apply_changes


def test_every_trace_is_counted_or_refused() -> None:
    outcomes = fuzz_traces.run(seed=0, examples=400)
    assert min(outcomes["counted"], outcomes["refused"]) > 50, outcomes


def test_the_same_seed_gives_the_same_examples() -> None:
    assert fuzz_traces.run(seed=3, examples=20) == fuzz_traces.run(seed=3, examples=20)


def test_there_are_seeds_of_both_versions() -> None:
    versions = [header["version"] for header, *_ in fuzz_traces.corpus()]
    assert versions.count(1) > 10
    assert versions.count(2) == 1


@pytest.mark.parametrize(
    ("checked", "unchecked"),
    [
        ("parser._int32", lambda key, what, values, most: values),
        ("format.check_int", lambda what, value, *bounds: value),
        ("replay.apply_changes", lambda store, changes: apply_changes(store, Changes(new=changes.new))),
    ],
)
def test_a_check_that_is_left_out_is_found(
    checked: str, unchecked: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"ubatch_guard.trace.{checked}", unchecked)
    with pytest.raises(fuzz_traces.FoundError):
        fuzz_traces.run(seed=0, examples=2000)
