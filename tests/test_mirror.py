"""The mirror against the reference over runs of a made-up engine: rows come, grow, change and go."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from ubatch_guard import reference
from ubatch_guard._core import Checker, Mirror
from ubatch_guard.step import CutRange, KVCacheGroup, Step, UnsafeCuts

NUM_BLOCKS = 40
STEPS = 40


class Engine:
    """Live requests and their rows, changed at random, with a mirror that is told of it.

    New rows take leading blocks of live rows, as prefix caching has it, and other blocks from anywhere: free
    ones, blocks of rows that went, and now and then one that somebody holds.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.groups = tuple(
            KVCacheGroup(
                tokens_per_column=random.choice([1, 2, 3, 4]),
                num_blocks=NUM_BLOCKS,
                sliding_window=random.randint(1, 10) if kind == "window" else None,
                attention_chunk_size=random.randint(1, 10) if kind == "chunk" else None,
                null_block=random.choice([0, 0, None]),
            )
            for kind in random.choices(["full", "full", "window", "chunk"], k=random.choice([1, 1, 2, 3]))
        )
        self.mirror = Mirror(self.groups)
        self.rows: dict[str, list[list[int]]] = {}
        self.named = 0

    def _blocks(self, count: int) -> list[int]:
        return [self.random.randrange(NUM_BLOCKS) for _ in range(count)]

    def _new_rows(self) -> list[list[int]]:
        rows = []
        donor = self.random.choice(list(self.rows.values())) if self.rows else None
        for group in range(len(self.groups)):
            shared = [] if donor is None else donor[group][: self.random.randint(0, len(donor[group]))]
            rows.append(shared + self._blocks(self.random.randint(0, 4)))
        return rows

    def change(self) -> None:
        """Some of what a scheduler does between two steps."""
        for request_id in [r for r in self.rows if self.random.random() < 0.1]:
            del self.rows[request_id]
            self.mirror.free(request_id)
        for request_id in [r for r in self.rows if self.random.random() < 0.05]:
            self.rows[request_id] = self._new_rows()
            self.mirror.replace(request_id, self.rows[request_id])
        while len(self.rows) < 8 and self.random.random() < 0.5:
            request_id = f"r{self.named}"
            self.named += 1
            rows = self._new_rows()
            self.rows[request_id] = rows
            self.mirror.add(request_id, [np.array(row, dtype=np.int32) for row in rows])
        growing = [r for r in self.rows if self.random.random() < 0.3]
        added = [
            None
            if self.random.random() < 0.2
            else [self._blocks(self.random.randint(0, 2)) for _ in self.groups]
            for _ in growing
        ]
        for request_id, blocks in zip(growing, added, strict=True):
            for row, more in zip(self.rows[request_id], blocks or [], strict=bool(blocks)):
                row.extend(more)
        self.mirror.append_each(growing, added)

    def batch(self) -> tuple[list[str], Step]:
        """Some live requests in some order, with token counts that fit into their rows."""
        request_ids = [r for r in self.rows if self.random.random() < 0.8]
        self.random.shuffle(request_ids)
        computed, scheduled = [], []
        for request_id in request_ids:
            room = min(
                len(row) * group.tokens_per_column
                for row, group in zip(self.rows[request_id], self.groups, strict=True)
            )
            computed.append(self.random.randint(0, room))
            scheduled.append(self.random.randint(0, min(room - computed[-1], 6)))
        dtype = self.random.choice([np.int32, np.int64])
        tables = []
        for group in range(len(self.groups)):
            width = max((len(self.rows[r][group]) for r in request_ids), default=0)
            table = np.zeros((len(request_ids), width), dtype=np.int32)
            for position, request_id in enumerate(request_ids):
                row = self.rows[request_id][group]
                table[position, : len(row)] = row
            tables.append(table)
        counts = np.array(computed, dtype=dtype), np.array(scheduled, dtype=dtype)
        return request_ids, Step(*counts, block_tables=tuple(tables), groups=self.groups)


@pytest.mark.parametrize("first_seed", range(0, 200, 10))
def test_mirror_answers_as_the_reference(first_seed: int) -> None:
    assert sum(run(Engine(Random(seed))) for seed in range(first_seed, first_seed + 10)) > 20


def run(engine: Engine) -> int:
    """Compare over a run of the engine; the number of steps with an unsafe cut."""
    checker = Checker(engine.groups)
    unsafe_steps = 0
    for _ in range(STEPS):
        engine.change()
        request_ids, step = engine.batch()
        counts = step.num_computed_tokens, step.num_scheduled_tokens
        slots = engine.mirror.slots(request_ids)
        first = engine.random.randint(0, 12)
        cuts = CutRange(first, first + engine.random.randint(0, 12))
        for asked in (None, cuts):
            bounds = () if asked is None else (asked.first, asked.last)
            expected = reference.unsafe_cuts(step, asked)
            found = engine.mirror.unsafe_cuts(slots, *counts, *bounds)
            assert tuple(UnsafeCuts(*fields) for fields in found) == expected
            assert engine.mirror.is_safe(slots, *counts, *bounds) is (not expected)
        order = engine.mirror.order(slots, *counts)
        assert order == checker.order(step.block_tables, *counts)
        assert (order is None) == (reference.order(step) is None)
        unsafe_steps += bool(reference.unsafe_cuts(step))
    for request_id, rows in engine.rows.items():
        for group, row in enumerate(rows):
            assert engine.mirror.row(request_id, group).tolist() == row
    return unsafe_steps
