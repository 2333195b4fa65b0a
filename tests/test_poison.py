"""Which blocks are fresh in a step, and which requests have a marked token: no vLLM, no tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ubatch_guard.vllm.poison import fresh_blocks, requests_with


def _new(req_id: str, computed: int, *rows: list[int]) -> SimpleNamespace:
    return SimpleNamespace(req_id=req_id, num_computed_tokens=computed, block_ids=rows)


def _step(
    new: list[SimpleNamespace],
    running: dict[str, tuple[int, tuple[list[int], ...] | None]] | None = None,
    resumed: set[str] | None = None,
) -> Any:
    running = running or {}
    cached = SimpleNamespace(
        req_ids=list(running),
        num_computed_tokens=[computed for computed, _ in running.values()],
        new_block_ids=[rows for _, rows in running.values()],
    )
    if resumed is not None:
        cached.resumed_req_ids = resumed
    return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)


@pytest.mark.parametrize(
    ("computed", "fresh"),
    [(0, [5, 6, 7]), (16, [6, 7]), (17, [7]), (31, [7]), (32, [7]), (47, []), (48, [])],
)
def test_a_new_request_has_computed_tokens_in_its_first_columns(computed: int, fresh: list[int]) -> None:
    """A block that holds some of them, a copy of a part of another block, is not fresh."""
    assert fresh_blocks(_step([_new("a", computed, [5, 6, 7])]), [16]) == [fresh]


def test_a_block_is_its_writers_wherever_a_reader_lists_it() -> None:
    """The reader comes first or last, and the block is fresh once."""
    writer, reader = _new("w", 0, [1, 2]), _new("r", 32, [1, 2, 3])
    assert fresh_blocks(_step([writer, reader]), [16]) == [[1, 2, 3]]
    assert fresh_blocks(_step([reader, writer]), [16]) == [[3, 1, 2]]
    # Without the writer, nothing of it is.
    assert fresh_blocks(_step([reader]), [16]) == [[3]]


def test_all_that_a_running_request_gets_is_fresh() -> None:
    step = _step([], {"a": (40, ([9],)), "b": (16, None), "c": (16, ([],))})
    assert fresh_blocks(step, [16]) == [[9]]


def test_a_resumed_request_lists_all_its_blocks() -> None:
    running = {"a": (32, ([1, 2, 3],)), "b": (32, ([4],))}
    assert fresh_blocks(_step([], running, resumed={"a"}), [16]) == [[3, 4]]
    # Only the release says who is resumed.
    assert fresh_blocks(_step([], running, resumed=set()), [16]) == [[1, 2, 3, 4]]


def test_groups_have_columns_of_their_own() -> None:
    """Blocks out of a window are the null block; a group that is left out has an endless column."""
    step = _step([_new("a", 64, [0, 0, 0, 4, 5], [11, 12, 13], [21])], {"b": (64, ([0, 6], [14], [22]))})
    assert fresh_blocks(step, [16, 32, 1 << 62]) == [[5, 6], [13, 14], [22]]


def test_requests_with_marked_tokens() -> None:
    rows = np.zeros(12, dtype=np.bool_)
    rows[[3, 8, 11]] = True
    # The last mark is in the padding.
    assert requests_with(rows, ["a", "b", "c", "d"], [3, 2, 3, 2]) == ["b", "d"]
    assert requests_with(rows, [], []) == []
