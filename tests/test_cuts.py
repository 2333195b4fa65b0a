"""The nearest safe cuts, against every choice there is over the slots of the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import oracle
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from strategies import steps

from ubatch_guard import CutRange, DtypeError, Guard, GuardError, KVCacheGroup, MirroredStep, Step
from ubatch_guard.cuts import nearest_safe_cuts
from ubatch_guard.reference import unsafe_cuts

Choice = tuple[int, ...] | None


def best_of_all(safe: Sequence[int], targets: Sequence[int]) -> Choice:
    """Every ascending choice of safe cuts is looked at."""

    def distance(choice: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        each = [abs(cut - target) for cut, target in zip(choice, targets, strict=True)]
        return max(each), sum(each), choice

    return min(combinations(safe, len(targets)), key=distance, default=None)


def ends_of_requests(step: Step) -> set[int]:
    return {int(end) for end in np.cumsum(step.num_scheduled_tokens)}


def targets_below(limit: int, most: int = 3) -> st.SearchStrategy[list[int]]:
    cuts = st.integers(-3, limit + 3)
    return st.lists(cuts, min_size=1, max_size=most, unique=True).map(sorted)


def mirrored(guard: Guard, step: Step) -> MirroredStep:
    guard.mirror.clear()
    ids = [f"r{position}" for position in range(step.num_reqs)]
    for position, request_id in enumerate(ids):
        tokens = int(step.num_computed_tokens[position] + step.num_scheduled_tokens[position])
        columns = [-(-tokens // group.tokens_per_column) for group in step.groups]
        guard.mirror.add(
            request_id, [table[position, :n] for table, n in zip(step.block_tables, columns, strict=True)]
        )
    return MirroredStep(
        guard.mirror.slots(ids),
        step.num_computed_tokens,
        step.num_scheduled_tokens,
        num_read_tokens=step.num_read_tokens,
        num_prompt_tokens=step.num_prompt_tokens,
    )


@settings(max_examples=400)
@given(step=steps(max_reqs=4), data=st.data(), at_requests=st.booleans())
def test_no_choice_of_safe_cuts_is_nearer(step: Step, data: st.DataObject, at_requests: bool) -> None:
    highest = step.num_tokens - 1
    targets = data.draw(targets_below(highest))
    first = data.draw(st.none() | st.integers(1, max(1, highest)))
    last = data.draw(st.none() | st.integers(-1, highest))
    asked = set(range(first or 1, (highest if last is None else last) + 1))
    if at_requests:
        asked &= ends_of_requests(step)
    guard = Guard(step.groups)

    right = best_of_all(sorted(asked - oracle.unsafe_cuts(step)), targets)
    by_reference = {cut for unsafe in unsafe_cuts(step) for cut in range(unsafe.first, unsafe.last + 1)}
    assert best_of_all(sorted(asked - by_reference), targets) == right
    limits = {"first": first, "last": last, "at_requests": at_requests}
    assert guard.nearest_safe_cuts(step, targets, **limits) == right
    assert guard.nearest_safe_cuts(step, np.array(targets), **limits) == right
    one = best_of_all(sorted(asked - oracle.unsafe_cuts(step)), targets[:1])
    assert guard.nearest_safe_cut(step, targets[0], **limits) == (None if one is None else one[0])
    if right is not None:
        assert guard.is_safe(step, CutRange(right[0], right[0]))
    if step.num_settled_tokens is None:
        assert guard.nearest_safe_cuts(mirrored(guard, step), targets, **limits) == right


@st.composite
def questions(draw: st.DrawFn, most: int = 4) -> tuple[list[CutRange], list[int], CutRange, list[int] | None]:
    """Unsafe ranges, targets, the cuts to choose from, and at which of them."""
    cuts = CutRange(draw(st.integers(1, 4)), draw(st.integers(0, 16)))
    edges = draw(st.lists(st.integers(1, 18), max_size=8, unique=True).map(sorted))
    unsafe = [CutRange(low, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=False)]
    at = draw(st.none() | st.lists(st.integers(0, 18), max_size=9, unique=True).map(sorted))
    return unsafe, draw(targets_below(16, most)), cuts, at


def right_answer(unsafe: list[CutRange], targets: list[int], cuts: CutRange, at: list[int] | None) -> Choice:
    safe = [cut for cut in cuts if not any(cut in bad for bad in unsafe) and (at is None or cut in at)]
    return best_of_all(safe, targets)


@settings(max_examples=1000)
@given(questions())
def test_ranges_and_places_of_any_kind(
    question: tuple[list[CutRange], list[int], CutRange, list[int] | None],
) -> None:
    assert nearest_safe_cuts(*question) == right_answer(*question)


def one_after_the_other(
    unsafe: list[CutRange], targets: list[int], cuts: CutRange, at: list[int] | None
) -> Choice:
    """A wrong rule: each target takes the nearest cut that the one before it has left."""
    chosen: list[int] = []
    for target in targets:
        free = CutRange(max(cuts.first, *(cut + 1 for cut in chosen)) if chosen else cuts.first, cuts.last)
        found = nearest_safe_cuts(unsafe, [target], free, at)
        if found is None:
            return None
        chosen += found
    return tuple(chosen)


def whatever_is_unsafe(
    unsafe: list[CutRange], targets: list[int], cuts: CutRange, at: list[int] | None
) -> Choice:
    """A wrong rule: no cut is unsafe."""
    return nearest_safe_cuts([], targets, cuts, at)


def nearest_in_sum(
    unsafe: list[CutRange], targets: list[int], cuts: CutRange, at: list[int] | None
) -> Choice:
    """A wrong rule: the summed distance alone counts."""
    safe = [cut for cut in cuts if not any(cut in bad for bad in unsafe) and (at is None or cut in at)]
    return min(
        combinations(safe, len(targets)),
        key=lambda choice: sum(abs(cut - target) for cut, target in zip(choice, targets, strict=True)),
        default=None,
    )


@pytest.mark.parametrize("wrong", [one_after_the_other, whatever_is_unsafe, nearest_in_sum])
def test_a_wrong_rule_is_noticed(wrong: Callable[..., Choice]) -> None:
    """Negative control: the comparison above tells each of these rules from the right one."""
    find(
        questions(),
        lambda question: wrong(*question) != right_answer(*question),
        settings=settings(max_examples=5000, derandomize=True, database=None, phases=[Phase.generate]),
    )


GROUP = KVCacheGroup(tokens_per_column=16, num_blocks=64)
READER, WRITER = [1, 2, 3, 4, 9, 0], [1, 2, 3, 4, 5, 6]
READER_FIRST = Step(
    num_computed_tokens=np.array([64, 0]),
    num_scheduled_tokens=np.array([16, 96]),
    block_tables=(np.array([READER, WRITER], np.int32),),
    groups=(GROUP,),
)
"""Its unsafe cuts are 1 to 79, of 1 to 111."""


def test_a_safe_target_stays_and_an_unsafe_one_moves() -> None:
    guard = Guard([GROUP])
    assert guard.nearest_safe_cut(READER_FIRST, 90) == 90
    assert guard.nearest_safe_cut(READER_FIRST, 56) == 80
    assert guard.nearest_safe_cut(READER_FIRST, 500) == 111
    assert guard.nearest_safe_cut(READER_FIRST, 56, last=79) is None
    assert guard.nearest_safe_cut(READER_FIRST, 56, first=100) == 100
    # The only boundary lies between the reader and its writer.
    assert guard.nearest_safe_cut(READER_FIRST, 56, at_requests=True) is None
    assert guard.nearest_safe_cut(READER_FIRST.permuted([1, 0]), 56, at_requests=True) == 96


def test_cuts_do_not_fall_together() -> None:
    guard = Guard([GROUP])
    assert guard.nearest_safe_cuts(READER_FIRST, [37, 74]) == (80, 81)
    assert guard.nearest_safe_cuts(READER_FIRST, [37, 74], last=80) is None


def test_a_step_too_small_to_be_cut_has_no_cut() -> None:
    guard = Guard([GROUP])
    for scheduled in ([], [0], [1], [0, 1, 0]):
        counts = np.array(scheduled, np.int32)
        step = Step(counts * 0, counts, (np.ones((len(counts), 1), np.int32),), (GROUP,))
        assert guard.nearest_safe_cut(step, 1) is None
        assert guard.nearest_safe_cut(step, 1, at_requests=True) is None


def test_millions_of_tokens_take_no_longer() -> None:
    """Work grows with targets and ranges alone; here a scan of the cuts would take minutes."""
    far = 2**31 - 2
    unsafe = [CutRange(10, far - 10)]
    assert nearest_safe_cuts(unsafe, [2**30 - 1, 2**30], CutRange(1, far)) == (9, far - 9)
    assert nearest_safe_cuts(unsafe, [5, 2**29, far - 5], CutRange(1, far)) == (5, 9, far - 5)


@pytest.mark.parametrize("kind", [int, np.int32, np.int64, np.uint8, np.array])
def test_a_target_is_an_integer_of_any_kind(kind: Callable[[int], int]) -> None:
    found = Guard([GROUP]).nearest_safe_cut(READER_FIRST, kind(56), first=kind(2), last=kind(110))
    assert found == 80
    assert type(found) is int


@pytest.mark.parametrize(
    ("targets", "limits", "error", "text"),
    [
        ([5.5], {}, DtypeError, "5.5 is no integer"),
        ([None], {}, DtypeError, "None is no integer"),
        ([56], {"first": "1"}, DtypeError, "'1' is no integer"),
        ([], {}, GuardError, "targets are empty"),
        ([4, 4], {}, GuardError, "targets do not ascend: 4 after 4"),
        ([9, 4], {}, GuardError, "targets do not ascend: 4 after 9"),
        ([56], {"first": 0}, GuardError, "no cuts 0 to 111: those of the step are 1 to 111"),
        ([56], {"last": 112}, GuardError, "no cuts 1 to 112"),
        ([56], {"last": 2**70}, GuardError, "no cuts 1 to 1180591620717411303424"),
    ],
)
def test_nonsense_is_an_error(
    targets: list[int], limits: dict[str, int], error: type[GuardError], text: str
) -> None:
    with pytest.raises(error, match=text):
        Guard([GROUP]).nearest_safe_cuts(READER_FIRST, targets, **limits)
