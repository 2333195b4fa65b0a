"""The reference against the slot-by-slot oracle, and vLLM's rule against what vLLM answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracle
import pytest
import strategies
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from ubatch_guard import reference
from ubatch_guard._core import (
    BlockIdError,
    Checker,
    DtypeError,
    GroupError,
    GuardError,
    ShapeError,
    TokenCountError,
)
from ubatch_guard.step import CutRange, KVCacheGroup, Step, UnsafeCuts
from ubatch_guard.trace import Replay, TraceReader

TRACES = sorted((Path(__file__).parent / "traces").rglob("*.jsonl.gz"))

many = settings(max_examples=200)


def _step(
    computed: list[int],
    scheduled: list[int],
    rows: list[list[int]],
    *,
    group: KVCacheGroup | None = None,
    settled: list[int] | None = None,
    read: list[int] | None = None,
) -> Step:
    return Step(
        num_computed_tokens=np.array(computed, dtype=np.int32),
        num_scheduled_tokens=np.array(scheduled, dtype=np.int32),
        block_tables=(np.array(rows, dtype=np.int32),),
        groups=(group or KVCacheGroup(tokens_per_column=4, num_blocks=100),),
        num_settled_tokens=None if settled is None else np.array(settled, dtype=np.int32),
        num_read_tokens=None if read is None else np.array(read, dtype=np.int32),
    )


def _expected(step: Step, cuts: set[int]) -> tuple[UnsafeCuts, ...]:
    """Maximal ranges of the oracle's cuts with the oracle's culprits."""
    firsts = sorted(cut for cut in cuts if cut - 1 not in cuts)
    lasts = sorted(cut for cut in cuts if cut + 1 not in cuts)
    return tuple(
        UnsafeCuts(first, last, *oracle.culprit(step, first))
        for first, last in zip(firsts, lasts, strict=True)
    )


def _core_cuts(step: Step, cuts: CutRange | None = None) -> tuple[UnsafeCuts, ...]:
    first, last = (None, None) if cuts is None else (cuts.first, cuts.last)
    found = Checker(step.groups).unsafe_cuts(
        step.block_tables,
        step.num_computed_tokens,
        step.num_scheduled_tokens,
        first,
        last,
        step.num_settled_tokens,
        step.num_read_tokens,
        step.num_prompt_tokens,
    )
    return tuple(UnsafeCuts(*fields) for fields in found)


def _core_order(step: Step, phases: list[int] | None) -> tuple[int, ...] | None:
    found = Checker(step.groups).order(
        step.block_tables,
        step.num_computed_tokens,
        step.num_scheduled_tokens,
        None if phases is None else np.array(phases, dtype=np.int8),
        step.num_settled_tokens,
        num_read_tokens=step.num_read_tokens,
        num_prompt_tokens=step.num_prompt_tokens,
    )
    return None if found is None else tuple(found[0])


@many
@given(strategies.steps())
def test_unsafe_cuts_are_the_oracles(step: Step) -> None:
    assert reference.unsafe_cuts(step) == _expected(step, oracle.unsafe_cuts(step))


@many
@given(strategies.steps())
def test_core_gives_the_references_answer(step: Step) -> None:
    assert _core_cuts(step) == reference.unsafe_cuts(step)


@many
@given(strategies.steps(), st.integers(-2, 40), st.integers(-2, 40))
def test_a_cut_range_clips(step: Step, first: int, last: int) -> None:
    cuts = CutRange(first, last)
    expected = _expected(step, oracle.unsafe_cuts(step) & set(cuts))
    assert reference.unsafe_cuts(step, cuts) == expected
    if first >= 0 and last >= 0:
        assert _core_cuts(step, cuts) == expected


@many
@given(strategies.steps())
def test_dependencies_are_the_oracles(step: Step) -> None:
    assert reference.dependencies(step) == oracle.dependencies(step)


@pytest.mark.parametrize("find_order", [reference.order, _core_order])
@many
@given(data=st.data())
def test_an_order_is_found_where_there_is_one_and_is_safe(
    find_order: Callable[[Step, list[int] | None], tuple[int, ...] | None], data: st.DataObject
) -> None:
    step = data.draw(strategies.steps())
    phases = data.draw(st.none() | strategies.phases(step.num_reqs))
    levels = phases or [0] * step.num_reqs
    found = find_order(step, phases)
    assert (found is not None) == oracle.order_exists(step, levels)
    if found is not None:
        assert sorted(found) == list(range(step.num_reqs))
        assert [levels[r] for r in found] == sorted(levels)
        assert not oracle.unsafe_cuts(step.permuted(found))


@many
@given(strategies.steps(), st.randoms(use_true_random=False))
def test_a_safe_order_is_a_topological_one(step: Step, random) -> None:
    """No shuffle is safe that does not put writers first: what ``order`` rests on."""
    shuffled = list(range(step.num_reqs))
    random.shuffle(shuffled)
    place = {request: i for i, request in enumerate(shuffled)}
    follows = all(place[writer] < place[reader] for reader, writer in oracle.dependencies(step))
    assert follows == (not oracle.unsafe_cuts(step.permuted(shuffled)))


def test_the_oracle_catches_vllms_rule() -> None:
    """Negative control: a wrong rule does not pass these tests, in either direction."""

    def allowed_but_unsafe(step: Step) -> bool:
        return reference.vllm_allows(step, 1) and bool(oracle.unsafe_cuts(step))

    def refused_but_safe(step: Step) -> bool:
        return not reference.vllm_allows(step, 1) and not oracle.unsafe_cuts(step)

    plausible = strategies.steps(plausible=True)
    unshrunk = settings(max_examples=20_000, phases=[Phase.generate], derandomize=True)
    assert find(plausible, allowed_but_unsafe, settings=unshrunk)
    assert find(plausible, refused_but_safe, settings=unshrunk)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_vllm_allows_what_vllm_allowed(path: Path) -> None:
    with TraceReader(path) as trace:
        replay = Replay(trace.header)
        for record in trace:
            allows = reference.vllm_allows(replay.step(record), trace.header.decode_threshold)
            assert allows == record.vllm_allows, f"line {trace.line}"


class TestByHand:
    """Small steps whose answer can be read off: block size 4."""

    def test_reader_before_writer(self) -> None:
        # Offsets 0..1 read blocks 1 and 2; offsets 2..9 write them, the last slot at offset 9.
        step = _step([8, 0], [2, 8], [[1, 2, 3], [1, 2, 0]])
        assert reference.unsafe_cuts(step) == (UnsafeCuts(1, 9, reader=0, writer=1, group=0, block=2),)

    def test_writer_before_reader(self) -> None:
        assert reference.unsafe_cuts(_step([0, 8], [8, 2], [[1, 2, 0], [1, 2, 3]])) == ()

    def test_writer_that_starts_inside_a_block(self) -> None:
        # Slots 0 and 1 of block 1 are older; the writer fills 2 and 3, of which the reader reads slot 2 only.
        step = _step([3, 2], [1, 2], [[1], [1]])
        assert reference.unsafe_cuts(step) == (UnsafeCuts(1, 1, reader=0, writer=1, group=0, block=1),)

    def test_reader_that_ends_before_the_written_slots(self) -> None:
        assert reference.unsafe_cuts(_step([2, 2], [1, 2], [[1], [1]])) == ()

    def test_adjacent_ranges_are_one(self) -> None:
        # Cut 1 is unsafe for request 0, cut 2 for request 1.
        step = _step([1, 1, 0], [1, 1, 1], [[1], [1], [1]])
        assert reference.unsafe_cuts(step) == (UnsafeCuts(1, 2, reader=0, writer=2, group=0, block=1),)

    def test_a_gap_makes_two_ranges(self) -> None:
        step = _step([4, 0, 4, 0], [1, 4, 1, 4], [[1, 5], [1, 0], [2, 6], [2, 0]])
        assert reference.unsafe_cuts(step) == (
            UnsafeCuts(1, 4, reader=0, writer=1, group=0, block=1),
            UnsafeCuts(6, 9, reader=2, writer=3, group=0, block=2),
        )

    def test_window_of_one_reads_no_prefix(self) -> None:
        group = KVCacheGroup(tokens_per_column=4, num_blocks=9, sliding_window=1)
        assert reference.unsafe_cuts(_step([8, 0], [2, 8], [[1, 2, 3], [1, 2, 0]], group=group)) == ()

    def test_window_reads_its_lowest_position(self) -> None:
        # Position 8 with a window of 6 reads 3..7: the last slot of block 1 and all of block 2.
        rows = [[1, 5, 6], [1, 4, 0]]
        for window, unsafe in ((6, True), (5, False)):
            group = KVCacheGroup(tokens_per_column=4, num_blocks=9, sliding_window=window)
            assert bool(reference.unsafe_cuts(_step([8, 0], [2, 5], rows, group=group))) is unsafe

    def test_chunk_reads_from_its_start(self) -> None:
        rows = [[1, 5, 6], [1, 4, 0]]
        for chunk, unsafe in ((16, True), (4, False)):
            group = KVCacheGroup(tokens_per_column=4, num_blocks=9, attention_chunk_size=chunk)
            assert bool(reference.unsafe_cuts(_step([8, 0], [2, 5], rows, group=group))) is unsafe

    def test_null_block_is_no_hazard(self) -> None:
        assert reference.unsafe_cuts(_step([8, 0], [2, 8], [[0, 0, 3], [0, 0, 0]])) == ()

    def test_without_a_null_block_zero_is_a_block(self) -> None:
        group = KVCacheGroup(tokens_per_column=4, num_blocks=9, null_block=None)
        assert reference.unsafe_cuts(_step([4, 0], [1, 4], [[0, 3], [0, 0]], group=group))

    def test_settled_positions_are_not_read(self) -> None:
        assert reference.unsafe_cuts(_step([8, 0], [2, 8], [[1, 2, 3], [1, 2, 0]], settled=[8, 0])) == ()
        (found,) = reference.unsafe_cuts(_step([8, 0], [2, 5], [[1, 2, 3], [1, 2, 0]], settled=[4, 0]))
        assert found == UnsafeCuts(1, 6, reader=0, writer=1, group=0, block=2)

    @pytest.mark.parametrize(
        ("computed", "scheduled", "read", "rows", "unsafe"),
        [
            # The reader's tokens have the offsets 0..143, the writer's position 255 the offset 399.
            ([128, 0], [144, 384], [256, 0], [[1, 2, 3, 4, 9, 0], [1, 2, 3, 4, 5, 6]], (1, 399)),
            ([128, 128], [144, 256], [256, 128], [[1, 2, 3, 4, 9, 0], [1, 2, 3, 4, 5, 6]], (1, 271)),
            # Both run positions again that both only read.
            ([128, 64], [144, 144], [256, 192], [[1, 2, 3, 4, 9], [1, 2, 3, 7, 0]], None),
        ],
    )
    def test_cached_positions_that_run_again_are_read_and_not_written(
        self,
        computed: list[int],
        scheduled: list[int],
        read: list[int],
        rows: list[list[int]],
        unsafe: tuple[int, int] | None,
    ) -> None:
        """vLLM's bounded replay: a window of 128 is computed again, blocks are of 64 tokens."""
        step = _step(computed, scheduled, rows, group=KVCacheGroup(64, 100), read=read)
        found = reference.unsafe_cuts(step)
        assert found == _core_cuts(step)
        assert [(cuts.first, cuts.last) for cuts in found] == ([] if unsafe is None else [unsafe])

    def test_the_prompt_and_the_window_are_read_and_not_the_gap(self) -> None:
        # Request 0 stands at position 16 with a prompt of 5 and a window of 5: it reads 0..4 and 12..15.
        group = KVCacheGroup(tokens_per_column=4, num_blocks=100, sliding_window=5, prompt_in_view=True)
        for block, position, unsafe in (
            (1, 0, True),
            (2, 0, True),
            (2, 1, False),
            (3, 0, False),
            (4, 0, True),
        ):
            # Request 1 writes one slot of the block.
            step = _step([16, position], [1, 1], [[1, 2, 3, 4, 5], [block, 0, 0, 0, 0]], group=group)
            with_prompt = replace(step, num_prompt_tokens=np.array([5, 0]))
            assert reference.unsafe_cuts(with_prompt) == _core_cuts(with_prompt)
            assert bool(reference.unsafe_cuts(with_prompt)) is unsafe
            # Where no prompt ends, all is read.
            assert reference.unsafe_cuts(step) == _core_cuts(step) != ()

    def test_nobody_reads_beyond_its_own_tokens(self) -> None:
        # Request 0 runs positions 4 and 5 of a cached prefix of 8; request 1 writes 6 and 7 of its block.
        step = _step([4, 6], [2, 2], [[1, 2], [1, 2]], read=[8, 6])
        assert reference.unsafe_cuts(step) == _core_cuts(step) == ()
        step.num_scheduled_tokens[0] = 3
        assert reference.unsafe_cuts(step) == _core_cuts(step) == (UnsafeCuts(1, 3, 0, 1, 0, 2),)

    def test_a_request_without_tokens_neither_reads_nor_writes(self) -> None:
        assert reference.unsafe_cuts(_step([8, 0], [0, 8], [[1, 2], [1, 2]])) == ()

    def test_order_of_a_cycle(self) -> None:
        # Each reads the block that the other writes.
        step = _step([4, 4], [4, 4], [[1, 2], [2, 1]])
        assert reference.order(step) is None
        assert _core_order(step, None) is None

    def test_order_of_a_chain_against_its_direction(self) -> None:
        # Request 0 waits for 2, which waits for 1: the first place is searched for twice on 0's behalf.
        step = _step([8, 0, 4], [2, 4, 4], [[1, 2, 3], [1, 0, 0], [1, 2, 0]])
        assert reference.dependencies(step) == {(0, 1), (0, 2), (2, 1)}
        assert reference.order(step) == _core_order(step, None) == (1, 2, 0)

    def test_order_against_the_phases(self) -> None:
        step = _step([8, 0], [2, 8], [[1, 2, 3], [1, 2, 0]])
        assert reference.order(step) == (1, 0)
        assert reference.order(step, [0, 2]) is None

    def test_vllm_needs_two_requests(self) -> None:
        assert reference.vllm_allows(_step([4], [8], [[1, 1, 1]]), None)


def _both(step: Step) -> list[Callable[[], object]]:
    return [lambda: reference.unsafe_cuts(step), lambda: _core_cuts(step)]


GOOD = KVCacheGroup(tokens_per_column=4, num_blocks=10)
ROWS = np.array([[1, 2], [1, 3]], dtype=np.int32)
COMPUTED = np.array([4, 0], dtype=np.int32)
SCHEDULED = np.array([1, 8], dtype=np.int32)
HUGE = np.array([2**31 - 1, 2**31 - 1], dtype=np.int64)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (Step(COMPUTED.astype(np.int16), SCHEDULED, (ROWS,), (GOOD,)), DtypeError),
        (Step(COMPUTED, SCHEDULED.astype(np.float64), (ROWS,), (GOOD,)), DtypeError),
        (Step(COMPUTED, SCHEDULED, (ROWS.astype(np.uint32),), (GOOD,)), DtypeError),
        (Step(COMPUTED[:1], SCHEDULED, (ROWS,), (GOOD,)), ShapeError),
        (Step(COMPUTED, SCHEDULED, (ROWS[:1],), (GOOD,)), ShapeError),
        (Step(COMPUTED, SCHEDULED, (ROWS[0],), (GOOD,)), ShapeError),
        (Step(COMPUTED, SCHEDULED, (ROWS[:, :1],), (GOOD,)), ShapeError),
        (Step(COMPUTED, SCHEDULED, (ROWS, ROWS), (GOOD,)), ShapeError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (GOOD,), SCHEDULED[:1]), ShapeError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (KVCacheGroup(4, 10, prompt_in_view=True),)), GroupError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (GOOD,), num_prompt_tokens=SCHEDULED[:1]), ShapeError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (GOOD,), num_prompt_tokens=-SCHEDULED), TokenCountError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (GOOD,), num_prompt_tokens=HUGE + 1), TokenCountError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (GOOD,), None, SCHEDULED[:1]), ShapeError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (GOOD,), None, COMPUTED - 1), TokenCountError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (GOOD,), None, COMPUTED.astype(np.int16)), DtypeError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (GOOD,), None, HUGE + 1), TokenCountError),
        (Step(-COMPUTED, SCHEDULED, (ROWS,), (GOOD,)), TokenCountError),
        (Step(COMPUTED, -SCHEDULED, (ROWS,), (GOOD,)), TokenCountError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (GOOD,), -SCHEDULED), TokenCountError),
        (Step(HUGE * 0, HUGE, (ROWS,), (KVCacheGroup(2**31 - 1, 10),)), TokenCountError),
        (Step(COMPUTED, SCHEDULED, (ROWS + 7,), (GOOD,)), BlockIdError),
        (Step(COMPUTED, SCHEDULED, (ROWS - 2,), (GOOD,)), BlockIdError),
        (Step(COMPUTED, SCHEDULED, (ROWS + np.int64(2**32),), (GOOD,)), BlockIdError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (KVCacheGroup(0, 10),)), GroupError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (KVCacheGroup(4, 0),)), GroupError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (KVCacheGroup(4, 10, sliding_window=0),)), GroupError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (KVCacheGroup(4, 10, attention_chunk_size=0),)), GroupError),
        (Step(COMPUTED, SCHEDULED, (ROWS,), (KVCacheGroup(4, 10, 4, 4),)), GroupError),
    ],
)
def test_bad_input_is_a_typed_error(step: Step, error: type[GuardError]) -> None:
    for ask in _both(step):
        with pytest.raises(error):
            ask()
