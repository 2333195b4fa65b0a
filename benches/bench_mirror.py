"""Keeping the mirror up: requests come, grow and go."""

from __future__ import annotations

import numpy as np

from ubatch_guard._core import Mirror
from ubatch_guard.bench import memory, upkeep
from ubatch_guard.cases import by_name, rows_of
from ubatch_guard.step import KVCacheGroup


class Upkeep:
    """Nanoseconds a block, of ids that are scattered over the pool."""

    params = ("mirror-add-lists", "mirror-add-arrays", "mirror-append-each", "mirror-free")
    param_names = ("change",)
    unit = "ns/block"
    version = "1"

    def track_upkeep(self, change: str) -> float:
        return {figure.case: figure.value for figure in upkeep(rounds=25)}[change]


class Memory:
    """Bytes the mirror holds."""

    params = ("mirror-bytes-per-block", "mirror-bytes-per-entry", "mirror-bytes-per-entry-grown")
    param_names = ("part",)
    unit = "bytes"
    version = "2"

    def track_memory(self, part: str) -> float:
        return {figure.case: figure.value for figure in memory()}[part]


class Peak:
    """Memory of a process with a mirror of a million blocks, all in use."""

    version = "1"

    def peakmem_million_blocks(self) -> None:
        mirror = Mirror([KVCacheGroup(16, 1 << 20)])
        mirror.add("all", (np.arange(1, 1 << 20, dtype=np.int32),))


class Batch:
    """What a step asks of the mirror beside the check."""

    version = "1"

    def setup(self) -> None:
        step = by_name("mixed256").step()
        self.step = step
        self.request_ids = [str(position) for position in range(step.num_reqs)]
        self.mirror = Mirror(step.groups)
        for request_id, rows in zip(self.request_ids, rows_of(step), strict=True):
            self.mirror.add(request_id, rows)
        self.slots = self.mirror.slots(self.request_ids)
        self.lengths = np.array([len(rows[0]) for rows in rows_of(step)], dtype=np.int32)
        assert self._difference() is None

    def _difference(self) -> tuple[int, int] | None:
        return self.mirror.first_difference(self.slots, 0, self.step.block_tables[0], self.lengths)

    def time_slots(self) -> None:
        self.mirror.slots(self.request_ids)

    def time_first_difference(self) -> None:
        self._difference()
