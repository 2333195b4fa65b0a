"""Where to cut instead: the safe cuts nearest to wished ones. Knows unsafe ranges, and no step."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import SupportsIndex

from ubatch_guard._core import DtypeError, GuardError
from ubatch_guard.step import CutRange, UnsafeCuts


def nearest_safe_cuts(
    unsafe: Sequence[CutRange | UnsafeCuts],
    targets: Iterable[SupportsIndex],
    cuts: CutRange,
    at: Iterable[SupportsIndex] | None = None,
) -> tuple[int, ...] | None:
    """The ascending safe cuts nearest to ``targets``, one for each.

    Of all choices the one whose largest distance to its target is least, of these the one whose summed
    distance is; of these the first in lexicographic order, so the lower of two cuts that are equally near.
    The cuts may lie close together: what makes a microbatch worth its while is the caller's to say.

    The time taken depends on the number of targets, of unsafe ranges and of ``at``, not on the distances.

    Args:
        unsafe: Unsafe cuts as `Guard.unsafe_cuts` answers: ascending and disjoint, all of ``cuts`` at least.
        targets: Wished cuts, strictly ascending; they may lie outside ``cuts``.
        cuts: The cuts to choose from.
        at: Ascending: choose from these of ``cuts`` alone; None: from all.

    Returns:
        As many cuts as targets, strictly ascending, so that no microbatch between two of them is empty; None
        where there are no such cuts.

    Raises:
        DtypeError: A target that is no integer.
        GuardError: No targets, or they do not ascend.
    """
    wished = [as_cut(target) for target in targets]
    if not wished:
        raise GuardError("targets are empty; a split has one cut at least")
    for lower, higher in pairwise(wished):
        if lower >= higher:
            raise GuardError(f"targets do not ascend: {higher} after {lower}")

    safe = _without(unsafe, cuts)
    if at is not None:
        safe = _at(safe, at)
    # No others are needed. Between two neighbouring targets the cuts of those below want to go down and the
    # cuts of those above want to go up; packed against the two ends, none of them is farther from its target.
    candidates = sorted(
        {
            cut
            for target in wished
            for side in (_upward(safe, target), _downward(safe, target))
            for cut in islice(side, len(wished))
        }
    )
    farthest = _cheapest(wished, candidates, max)
    if farthest is None:
        return None
    reach = max(abs(cut - target) for cut, target in zip(farthest, wished, strict=True))
    return _cheapest(wished, candidates, operator.add, reach)


_Choice = tuple[int, tuple[int, ...]]
"""Joined distances, and the cuts."""


def as_cut(value: SupportsIndex) -> int:
    """A cut of any integer type as an int.

    Raises:
        DtypeError: It is no integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise DtypeError(f"{value!r} is no integer; a cut is a number of tokens") from None


def _without(unsafe: Sequence[CutRange | UnsafeCuts], cuts: CutRange) -> list[CutRange]:
    """The ranges of ``cuts`` that are left without the unsafe ones, ascending."""
    left = []
    first = cuts.first
    for bad in unsafe:
        left.append(CutRange(first, min(bad.first - 1, cuts.last)))
        first = max(first, bad.last + 1)
    left.append(CutRange(first, cuts.last))
    return [part for part in left if len(part)]


def _at(safe: Sequence[CutRange], places: Iterable[SupportsIndex]) -> list[CutRange]:
    """Those of the places that are safe, each a range of its own."""
    found = []
    for place in dict.fromkeys(map(as_cut, places)):
        nearest = bisect_right(safe, place, key=lambda part: part.first) - 1
        if nearest >= 0 and place in safe[nearest]:
            found.append(CutRange(place, place))
    return found


def _upward(safe: Sequence[CutRange], target: int) -> Iterator[int]:
    """The safe cuts from ``target`` upwards."""
    for part in safe:
        yield from range(max(part.first, target), part.last + 1)


def _downward(safe: Sequence[CutRange], target: int) -> Iterator[int]:
    """The safe cuts from ``target`` downwards."""
    for part in reversed(safe):
        yield from range(min(part.last, target), part.first - 1, -1)


def _cheapest(
    targets: Sequence[int],
    candidates: Sequence[int],
    join: Callable[[int, int], int],
    reach: int | None = None,
) -> tuple[int, ...] | None:
    """One candidate for each target, ascending and within ``reach``: those of least joined distance."""
    # By position: the best choice for the targets so far among the candidates in front of it.
    before: list[_Choice | None] = [(0, ())] * (len(candidates) + 1)
    for target in targets:
        best: list[_Choice | None] = [None]
        for cut, choice in zip(candidates, before, strict=False):
            distance = abs(cut - target)
            options = [best[-1]]
            if choice is not None and (reach is None or distance <= reach):
                options.append((join(choice[0], distance), (*choice[1], cut)))
            best.append(min((option for option in options if option is not None), default=None))
        before = best
    return None if before[-1] is None else before[-1][1]
