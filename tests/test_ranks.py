"""Shares for many ranks against every way in which the ranks can stand."""

from __future__ import annotations

from itertools import product

import pytest

from ubatch_guard.trace.audit import TraceAudit
from ubatch_guard.trace.ranks import rank_shares

# What a step is: (unsafe at the cut, unsafe at some cut, refused by vLLM's rule).
STEPS = [
    (False, False, False),
    (False, False, False),
    (False, False, True),
    (True, True, False),
    (True, True, True),
    (False, True, False),
    (False, True, True),
]


def _audits(steps: list[tuple[bool, bool, bool]]) -> list[TraceAudit]:
    """One trace a step, as the counts are sums."""
    return [
        TraceAudit(
            "",
            steps=2,
            eligible=1,
            hazardous=unsafe,
            hazardous_any_cut=any_cut,
            engine_vetoed=refused,
            engine_missed=unsafe and not refused,
            kept=1,
        )
        for unsafe, any_cut, refused in steps
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shares_are_those_of_all_places_of_the_ranks(ranks: int) -> None:
    shares = rank_shares(_audits(STEPS), ranks)
    assert shares is not None
    places = list(product(STEPS, repeat=ranks))

    def share(number: int) -> float:
        return pytest.approx(number / len(places))

    def passes(place: tuple[tuple[bool, bool, bool], ...]) -> bool:
        return not any(refused for _, _, refused in place)

    def is_wrong(place: tuple[tuple[bool, bool, bool], ...]) -> bool:
        return any(unsafe for unsafe, _, _ in place)

    assert shares.engine_kept == share(sum(map(passes, places)))
    assert shares.veto_kept == share(sum(not any(any_cut for _, any_cut, _ in place) for place in places))
    assert shares.kept == 1.0
    assert shares.unsafe_unguarded == share(sum(map(is_wrong, places)))
    assert shares.unsafe_engine == share(sum(passes(place) and is_wrong(place) for place in places))


def test_one_veto_stops_every_rank() -> None:
    """Of 1,000 steps 24 are refused: 64 ranks keep a fifth."""
    shares = rank_shares(_audits([(False, False, True)] * 24 + [(False, False, False)] * 976), 64)
    assert shares is not None
    assert round(shares.engine_kept, 2) == 0.21


def test_there_are_no_shares_of_nothing() -> None:
    assert rank_shares([TraceAudit("", steps=3)], 2) is None
