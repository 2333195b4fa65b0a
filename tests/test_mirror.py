"""The mirror against the reference while a made-up scheduler works: rows come, grow, change and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ubatch_guard import reference
from ubatch_guard._core import Checker, Mirror
from ubatch_guard.step import CutRange, KVCacheGroup, Step, UnsafeCuts

NUM_BLOCKS = 40
MOST_REQUESTS = 8
COLUMNS = 6
"""Of a request that the mirror does not know."""
many = settings(max_examples=150, stateful_step_count=40)

Rows = list[list[int]]
blocks = st.integers(0, NUM_BLOCKS - 1) | st.just(0)
"""Free ones, blocks of rows that went, and now and then one that somebody holds, the null block too."""


@st.composite
def groups(draw: st.DrawFn) -> KVCacheGroup:
    kind = draw(st.sampled_from(["full", "full", "window", "chunk"]))
    return KVCacheGroup(
        tokens_per_column=draw(st.integers(1, 4)),
        num_blocks=NUM_BLOCKS,
        sliding_window=draw(st.integers(1, 10)) if kind == "window" else None,
        attention_chunk_size=draw(st.integers(1, 10)) if kind == "chunk" else None,
        prompt_in_view=kind == "window" and draw(st.booleans()),
        null_block=draw(st.sampled_from([0, 0, None])),
    )


class Scheduler(RuleBasedStateMachine):
    """Live requests and their rows, with a mirror that is told of each change."""

    make_mirror: Callable[[Sequence[KVCacheGroup]], Mirror] = staticmethod(Mirror)

    @initialize(groups=st.lists(groups(), min_size=1, max_size=3))
    def start(self, groups: list[KVCacheGroup]) -> None:
        self.groups = tuple(groups)
        self.mirror = self.make_mirror(groups)
        self.rows: dict[str, Rows] = {}
        self.num_named = 0

    def _new_rows(self, draw: st.DrawFn) -> Rows:
        """Leading blocks of a live row, as prefix caching has it, and others from anywhere."""
        donors: list[Rows] = list(self.rows.values())
        donor = draw(st.sampled_from(donors)) if donors else [[] for _ in self.groups]
        return [row[: draw(st.integers(0, len(row)))] + draw(st.lists(blocks, max_size=4)) for row in donor]

    def _live(self, draw: st.DrawFn) -> str:
        return draw(st.sampled_from(sorted(self.rows)))

    @precondition(lambda self: len(self.rows) < MOST_REQUESTS)
    @rule(data=st.data(), as_arrays=st.booleans())
    def add(self, data: st.DataObject, as_arrays: bool) -> None:
        request_id = f"r{self.num_named}"
        self.num_named += 1
        rows = self._new_rows(data.draw)
        self.rows[request_id] = rows
        self.mirror.add(request_id, [np.array(row, dtype=np.int32) for row in rows] if as_arrays else rows)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        request_id = self._live(data.draw)
        self.rows[request_id] = self._new_rows(data.draw)
        self.mirror.replace(request_id, self.rows[request_id])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        request_id = self._live(data.draw)
        added = [data.draw(st.lists(blocks, max_size=2)) for _ in self.groups]
        self._grow(request_id, added)
        self.mirror.append(request_id, added)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def append_each(self, data: st.DataObject) -> None:
        growing = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        added = [
            data.draw(st.none() | st.tuples(*(st.lists(blocks, max_size=2) for _ in self.groups)))
            for _ in growing
        ]
        for request_id, more in zip(growing, added, strict=True):
            self._grow(request_id, more or [])
        self.mirror.append_each(growing, added)

    def _grow(self, request_id: str, added: Sequence[list[int]]) -> None:
        for row, more in zip(self.rows[request_id], added, strict=bool(added)):
            row.extend(more)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request_id = self._live(data.draw)
        del self.rows[request_id]
        self.mirror.free(request_id)

    @rule(data=st.data(), first=st.integers(0, 12), length=st.integers(0, 12))
    def ask(self, data: st.DataObject, first: int, length: int) -> None:
        request_ids, step = self._batch(data.draw)
        counts = step.num_computed_tokens, step.num_scheduled_tokens
        more = {"num_read_tokens": step.num_read_tokens, "num_prompt_tokens": step.num_prompt_tokens}
        slots = self.mirror.slots(request_ids, missing=True)
        for asked in (None, CutRange(first, first + length)):
            bounds = () if asked is None else (asked.first, asked.last)
            expected = reference.unsafe_cuts(step, asked)
            found = self.mirror.unsafe_cuts(slots, *counts, *bounds, **more)
            assert tuple(UnsafeCuts(*fields) for fields in found) == expected
            assert self.mirror.is_safe(slots, *counts, *bounds, **more) is (not expected)
        checker = Checker(step.groups)
        order = self.mirror.order(slots, *counts, **more)
        assert order == checker.order(step.block_tables, *counts, **more)
        kept = self.mirror.order(slots, *counts, short_query=2, **more)
        assert kept == checker.order(step.block_tables, *counts, short_query=2, **more)
        assert (order is None) == (reference.order(step) is None)

    def _batch(self, draw: st.DrawFn) -> tuple[list[str], Step]:
        """Some live requests in some order, with token counts that fit into their rows.

        Among them are requests that the mirror has no rows of. Theirs are of blocks that nobody else holds.
        """
        strangers = [f"stranger{i}" for i in range(draw(st.integers(0, 2)))]
        request_ids = draw(st.permutations(sorted(self.rows) + strangers))
        request_ids = request_ids[: draw(st.integers(0, len(request_ids)))]
        private = [[*range(NUM_BLOCKS + i * COLUMNS, NUM_BLOCKS + (i + 1) * COLUMNS)] for i in range(2)]
        rows = self.rows | {
            name: [own] * len(self.groups) for name, own in zip(strangers, private, strict=False)
        }
        groups = tuple(replace(group, num_blocks=NUM_BLOCKS + 2 * COLUMNS) for group in self.groups)
        computed, scheduled = [], []
        for request_id in request_ids:
            room = min(
                len(row) * group.tokens_per_column
                for row, group in zip(rows[request_id], groups, strict=True)
            )
            computed.append(draw(st.integers(0, room)))
            scheduled.append(draw(st.integers(0, min(room - computed[-1], 6))))
        dtype = draw(st.sampled_from([np.int32, np.int64]))
        tables = []
        for group in range(len(self.groups)):
            width = max((len(rows[r][group]) for r in request_ids), default=0)
            table = np.zeros((len(request_ids), width), dtype=np.int32)
            for position, request_id in enumerate(request_ids):
                row = rows[request_id][group]
                table[position, : len(row)] = row
            tables.append(table)
        counts = np.array(computed, dtype=dtype), np.array(scheduled, dtype=dtype)
        read = None
        if draw(st.booleans()):
            read = counts[0] + draw(st.sampled_from([0, 1, 3]))
        prompt = counts[0] // 2 if draw(st.booleans()) else None
        return request_ids, Step(
            *counts, block_tables=tuple(tables), groups=groups, num_read_tokens=read, num_prompt_tokens=prompt
        )

    def teardown(self) -> None:
        for request_id, rows in getattr(self, "rows", {}).items():
            for group, row in enumerate(rows):
                assert self.mirror.row(request_id, group).tolist() == row


class TestScheduler(Scheduler.TestCase):
    settings = many


class _AlwaysSafe:
    """A mirror that finds nothing."""

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        self._right = Mirror(groups)

    def __getattr__(self, name: str) -> object:
        return getattr(self._right, name)

    def is_safe(self, *_: object, **__: object) -> bool:
        return True


def _without_locality(groups: Sequence[KVCacheGroup]) -> Mirror:
    return Mirror(
        [
            replace(group, sliding_window=None, attention_chunk_size=None, prompt_in_view=False)
            for group in groups
        ]
    )


def _without_null(groups: Sequence[KVCacheGroup]) -> Mirror:
    return Mirror([replace(group, null_block=None) for group in groups])


@pytest.mark.parametrize("wrong", [_AlwaysSafe, _without_locality, _without_null])
def test_a_wrong_mirror_is_found(wrong: Callable[[Sequence[KVCacheGroup]], Mirror]) -> None:
    """Negative control, made the same in every run."""

    class Wrong(Scheduler):
        make_mirror = staticmethod(wrong)

    once = settings(
        many, max_examples=20_000, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Wrong, settings=once)
