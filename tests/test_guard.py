"""The policy over the core, on steps small enough to read."""

from __future__ import annotations

import numpy as np
import pytest

from ubatch_guard import (
    CutRange,
    Guard,
    GuardError,
    KVCacheGroup,
    MirroredStep,
    OrderConstraint,
    Phase,
    PhaseError,
    Policy,
    Reason,
    ShapeError,
    Step,
    TokenCountError,
    UnsafeCuts,
    feasible_cuts,
)

GROUP = KVCacheGroup(tokens_per_column=16, num_blocks=64)


def _step(*requests: tuple[list[int], int, int], group: KVCacheGroup = GROUP) -> Step:
    """A step of one group from (row, computed, scheduled)."""
    table = np.zeros((len(requests), max(len(row) for row, _, _ in requests)), np.int32)
    for position, (row, _, _) in enumerate(requests):
        table[position, : len(row)] = row
    return Step(
        num_computed_tokens=np.array([computed for _, computed, _ in requests], np.int32),
        num_scheduled_tokens=np.array([scheduled for _, _, scheduled in requests], np.int32),
        block_tables=(table,),
        groups=(group,),
    )


# Blocks 1 to 4 hold a prefix of 64 tokens: the writer computes it, the reader relies on it.
READER = ([1, 2, 3, 4, 9], 64, 16)
WRITER = ([1, 2, 3, 4, 5, 6], 0, 96)
READER_FIRST = _step(READER, WRITER)
WRITER_FIRST = _step(WRITER, READER)


def _mirrored(guard: Guard, step: Step) -> MirroredStep:
    ids = [f"r{position}" for position in range(step.num_reqs)]
    for position, request_id in enumerate(ids):
        tokens = int(step.num_computed_tokens[position] + step.num_scheduled_tokens[position])
        rows = [
            table[position, : -(-tokens // group.tokens_per_column)]
            for table, group in zip(step.block_tables, step.groups, strict=True)
        ]
        guard.mirror.add(request_id, rows)
    return MirroredStep(guard.mirror.slots(ids), step.num_computed_tokens, step.num_scheduled_tokens)


def test_the_unsafe_cuts_end_where_the_last_shared_token_is_written() -> None:
    # Offsets 16 .. 79 are the writer's first 64 tokens.
    assert Guard([GROUP]).unsafe_cuts(READER_FIRST) == (UnsafeCuts(1, 79, 0, 1, 0, 4),)
    assert Guard([GROUP]).unsafe_cuts(WRITER_FIRST) == ()


def test_a_question_about_other_cuts_gets_another_answer() -> None:
    guard = Guard([GROUP], Policy.VETO)
    assert guard.unsafe_cuts(READER_FIRST, CutRange(70, 200)) == (UnsafeCuts(70, 79, 0, 1, 0, 4),)
    assert guard.decide(READER_FIRST, 79).reason is Reason.UNSAFE
    assert guard.decide(READER_FIRST, 80).reason is Reason.SAFE
    assert guard.decide(READER_FIRST, [80, 90]).allow
    assert not guard.decide(READER_FIRST, [37, 74]).allow
    # Between the two cuts lies an unsafe one, but nobody cuts there.
    assert guard.decide(READER_FIRST, [0, 80]).allow
    assert not guard.is_safe(READER_FIRST)
    assert guard.is_safe(READER_FIRST, CutRange(80, 111))
    assert guard.is_safe(READER_FIRST, CutRange(80, 79)), "no cut, no unsafe cut"


@pytest.mark.parametrize("mirrored", [False, True])
def test_policies(mirrored: bool) -> None:
    def decide(policy: str, constraint: OrderConstraint = OrderConstraint.FREE):  # type: ignore[no-untyped-def]
        guard = Guard([GROUP], policy)
        step = _mirrored(guard, READER_FIRST) if mirrored else READER_FIRST
        phases = [Phase.EXTEND, Phase.PREFILL]
        return guard.decide(step, phases=phases, constraint=constraint)

    observed = decide("observe")
    assert (observed.allow, observed.reason) == (True, Reason.OBSERVED)
    assert observed.unsafe == (UnsafeCuts(56, 79, 0, 1, 0, 4),)
    assert (decide("veto").allow, decide("veto").reason) == (False, Reason.UNSAFE)
    reordered = decide("reorder")
    assert (reordered.allow, reordered.reason) == (True, Reason.REORDERED)
    assert reordered.order is not None
    assert reordered.order.permutation == (1, 0)
    assert reordered.order.swaps == ((0, 1),)
    assert Guard([GROUP]).unsafe_cuts(READER_FIRST.permuted(reordered.order.permutation)) == ()
    assert decide("reorder", OrderConstraint.DECODES_LEAD).allow, "extends and prefills are one section"
    # A writer of the last section cannot come before a reader of the section in front of it.
    assert decide("reorder", OrderConstraint.DECODE_EXTEND_PREFILL).reason is Reason.NO_ORDER
    assert decide("reorder", OrderConstraint.FIXED).reason is Reason.UNSAFE


def test_requests_that_rely_on_each_other_have_no_order() -> None:
    each = _step(([1, 2], 16, 16), ([2, 1], 16, 16))
    verdict = Guard([GROUP]).decide(each)
    assert (verdict.allow, verdict.reason) == (False, Reason.NO_ORDER)
    assert Guard([GROUP]).order(each) is None


DECODE = ([10], 5, 1)
SHORT_READER = ([1, 2, 3, 4, 11], 64, 4)
BEHIND_A_READER = ([1, 2, 3, 4, 11, 12], 68, 8)
"""Short as well, and it reads what the short reader writes."""


def test_a_short_reader_goes_behind_its_writer_and_no_other_short_request_does() -> None:
    step = _step(SHORT_READER, DECODE, DECODE, WRITER, DECODE)
    guard = Guard([GROUP])
    free = guard.order(step)
    assert free is not None
    assert (free.permutation, free.demoted) == ((3, 1, 2, 0, 4), ()), "every decode is behind the writer"
    kept = guard.order(step, short_query=8)
    assert kept is not None
    assert (kept.permutation, kept.demoted) == ((2, 1, 3, 0, 4), (0,))
    assert guard.unsafe_cuts(step.permuted(kept.permutation)) == ()


@pytest.mark.parametrize("mirrored", [False, True])
def test_whoever_needs_a_long_writer_through_others_is_demoted(mirrored: bool) -> None:
    guard = Guard([GROUP])
    plain = _step(BEHIND_A_READER, DECODE, SHORT_READER, WRITER)
    step = _mirrored(guard, plain) if mirrored else plain
    order = guard.order(step, short_query=8)
    assert order is not None
    assert order.demoted == (0, 2)
    assert order.permutation[0] == 1
    assert guard.unsafe_cuts(plain.permuted(order.permutation)) == ()
    assert guard.order(step, short_query=7) == guard.order(step, short_query=4), "request 0 has 8 tokens"


def test_a_right_batch_is_left_as_it_is_whoever_is_short() -> None:
    order = Guard([GROUP]).order(_step(DECODE, WRITER, DECODE, SHORT_READER), short_query=8)
    assert order is not None
    assert (order.permutation, order.swaps, order.demoted) == ((0, 1, 2, 3), (), ())


def test_too_many_demoted_tokens_are_not_worth_an_order() -> None:
    guard = Guard([GROUP])
    step = _step(SHORT_READER, DECODE, WRITER)  # the reader has 68 tokens when the step is done
    assert guard.decide(step, short_query=8, max_demoted_tokens=68).reason is Reason.REORDERED
    refused = guard.vote(step, short_query=8, max_demoted_tokens=67)
    assert (refused.allow, refused.reason, refused.order) == (False, Reason.DEMOTES, None)
    assert guard.decide(step, short_query=3, max_demoted_tokens=0).allow, "nobody is short"
    assert guard.decide(step, max_demoted_tokens=0).allow
    assert Guard([GROUP], "veto").decide(step, short_query=8, max_demoted_tokens=0).reason is Reason.UNSAFE


def test_a_right_order_moves_nobody() -> None:
    order = Guard([GROUP]).order(WRITER_FIRST)
    assert order is not None
    assert order.permutation == (0, 1)
    assert order.swaps == ()
    assert Guard([GROUP]).order(WRITER_FIRST, constraint=OrderConstraint.FIXED) == order


def test_what_was_written_before_this_step_is_no_hazard() -> None:
    settled = Step(
        READER_FIRST.num_computed_tokens,
        READER_FIRST.num_scheduled_tokens,
        READER_FIRST.block_tables,
        READER_FIRST.groups,
        num_settled_tokens=np.array([48, 0]),
    )
    # Only the last of the four blocks is read of this step's making; three are settled.
    assert Guard([GROUP]).unsafe_cuts(settled) == (UnsafeCuts(1, 79, 0, 1, 0, 4),)
    settled.num_settled_tokens[0] = 64  # type: ignore[index]
    assert Guard([GROUP]).unsafe_cuts(settled) == ()


def test_a_window_hides_what_lies_below_it() -> None:
    window = KVCacheGroup(16, 64, sliding_window=32)
    # At position 64 a window of 32 begins at position 33, in the third column; the row's first two ids
    # are of blocks that were freed and belong to the writer now.
    stale = _step(([7, 8, 3, 4, 9], 64, 16), ([0, 0, 0, 0, 7, 8], 64, 32), group=window)
    assert Guard([window]).unsafe_cuts(stale) == ()
    full = Step(
        stale.num_computed_tokens, stale.num_scheduled_tokens, stale.block_tables, (KVCacheGroup(16, 64),)
    )
    assert Guard(full.groups).unsafe_cuts(full) != ()


def test_a_request_without_a_row_takes_room_and_concerns_nobody() -> None:
    guard = Guard([GROUP])
    for name, row in (("reader", READER[0]), ("writer", WRITER[0])):
        guard.mirror.add(name, [row])
    slots = guard.mirror.slots(["new", "reader", "other", "writer"], missing=True)
    step = MirroredStep(slots, np.array([0, 64, 7, 0]), np.array([10, 16, 5, 96]))
    # The reader begins at offset 10; the writer's first 64 tokens are the offsets 31 .. 94.
    assert guard.unsafe_cuts(step) == (UnsafeCuts(11, 94, 1, 3, 0, 4),)
    order = guard.order(step)
    assert order is not None
    assert order.permutation == (0, 3, 2, 1)


def test_an_undecidable_step_is_refused_not_raised() -> None:
    bad = _step(([1, 2, 3, 99], 64, 0), WRITER)
    bad.num_scheduled_tokens[0] = 16
    guard = Guard([GROUP])
    with pytest.raises(GuardError):
        guard.decide(bad)
    verdict = guard.vote(bad)
    assert (verdict.allow, verdict.reason) == (False, Reason.UNDECIDED)
    assert verdict.error is not None
    assert "99" in verdict.error
    assert guard.vote(WRITER_FIRST).allow, "the guard still works"


def test_bad_questions() -> None:
    with pytest.raises(ValueError, match="1"):
        Guard([GROUP], num_ubatches=1)
    with pytest.raises(ValueError, match="perhaps"):
        Guard([GROUP], "perhaps")
    with pytest.raises(ShapeError, match="groups"):
        Guard([KVCacheGroup(32, 64)]).decide(READER_FIRST)
    with pytest.raises(PhaseError, match="decodes_lead"):
        Guard([GROUP]).order(READER_FIRST, constraint=OrderConstraint.DECODES_LEAD)
    with pytest.raises(ShapeError, match="phases"):
        Guard([GROUP]).order(READER_FIRST, [Phase.DECODE], OrderConstraint.DECODES_LEAD)
    with pytest.raises(TokenCountError, match="-1"):
        Guard([GROUP]).decide(_step(([1], -1, 1), ([2], 0, 1)))


def test_feasible_cuts() -> None:
    assert feasible_cuts(112) == CutRange(56, 111)
    assert feasible_cuts(112, 2, 128) == CutRange(64, 111)
    assert feasible_cuts(112, 4) == CutRange(28, 111)
    assert len(feasible_cuts(60, 2, 128)) == 0, "padded past the end, the last microbatch would be empty"
    with pytest.raises(ValueError, match="below num_tokens 112"):
        feasible_cuts(112, 2, 100)
