"""What a step reads, slot by slot: the oracle of the scheduler's histories, on steps small enough to see."""

from __future__ import annotations

from ubatch_guard.vllm.scheduler_histories.slots import Reads, Row, SlotContents, prefix_keys

PROMPT = [1, 2, 3, 4, 5, 6]


def _step(contents: SlotContents, writers: dict[str, Row], readers: dict[str, Row]) -> Reads:
    """``writers`` write from their first position to the last of their tokens."""
    writes = {}
    for name, row in writers.items():
        for position in range(row.num_computed_tokens, len(row.tokens)):
            for slot in contents.slots(row, position):
                writes[slot] = (name, row.keys()[position])
    return contents.reads({**readers, **writers}, writes)


def test_a_reader_of_what_another_writes_is_found() -> None:
    contents = SlotContents(2, [None])
    reads = _step(
        contents,
        {"writer": Row(PROMPT, 0, [[1, 2, 3]])},
        {"reader": Row([1, 2, 3, 4, 9], 4, [[1, 2, 7]])},
    )
    assert not reads.wrong
    assert reads.num_reads == 4
    (sharing,) = reads.sharing
    assert (sharing.reader, sharing.writer, sharing.position) == ("reader", "writer", 3)


def test_what_was_written_before_the_step_is_not_shared_within_it() -> None:
    contents = SlotContents(2, [None])
    for position, key in enumerate(prefix_keys(PROMPT)):
        contents.write((0, 1 + position // 2, position % 2), key)
    reads = _step(contents, {}, {"reader": Row([1, 2, 3, 4, 9], 4, [[1, 2, 7]])})
    assert (reads.sharing, reads.wrong) == ([], [])


def test_a_slot_that_nobody_wrote_is_wrong() -> None:
    reads = _step(SlotContents(2, [None]), {}, {"reader": Row(PROMPT, 2, [[1, 2, 3]])})
    assert reads.wrong == [("reader", 0, 0), ("reader", 0, 1)]


def test_a_slot_of_another_prefix_is_wrong() -> None:
    contents = SlotContents(2, [None])
    reads = _step(
        contents,
        {"writer": Row([8, 2], 0, [[1]])},
        {"reader": Row([1, 2, 9], 2, [[1, 2]])},
    )
    assert {request for request, _, _ in reads.wrong} == {"reader"}


def test_a_window_reads_only_its_last_positions() -> None:
    contents = SlotContents(2, [3])
    reads = _step(
        contents,
        {"writer": Row(PROMPT, 0, [[1, 2, 3]])},
        # Its first query stands at position 4 and sees 2, 3 and itself; the first block is gone by now.
        {"reader": Row([1, 2, 3, 4, 9], 4, [[0, 2, 7]])},
    )
    assert (reads.num_reads, reads.wrong) == (2, [])
    assert [sharing.position for sharing in reads.sharing] == [3]
