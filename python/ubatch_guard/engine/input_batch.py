"""The persistent batch: which request sits in which row, and its blocks. vLLM's names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from .kv_cache import KVCacheConfig
from .outputs import BlockIds


class BlockTable:
    """Rows of block ids for one KV cache group; what stands past a row's end is stale."""

    def __init__(self, block_size: int, max_num_reqs: int, max_num_blocks_per_req: int) -> None:
        self.block_size = block_size
        self.num_blocks_per_row: npt.NDArray[np.int32] = np.zeros(max_num_reqs, dtype=np.int32)
        self._table: npt.NDArray[np.int32] = np.zeros((max_num_reqs, max_num_blocks_per_req), dtype=np.int32)

    def get_numpy_array(self) -> npt.NDArray[np.int32]:
        """Shape ``[max_num_reqs, max_num_blocks_per_req]``; the table itself, no copy."""
        return self._table

    def append_row(self, block_ids: Sequence[int], row: int) -> None:
        """Add blocks to the end of a row."""
        start = int(self.num_blocks_per_row[row])
        self._table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks_per_row[row] += len(block_ids)

    def add_row(self, block_ids: Sequence[int], row: int) -> None:
        """Put blocks into a row in place of what it holds."""
        self.num_blocks_per_row[row] = 0
        self.append_row(block_ids, row)

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another."""
        num_blocks = self.num_blocks_per_row[source]
        self._table[target, :num_blocks] = self._table[source, :num_blocks]
        self.num_blocks_per_row[target] = num_blocks

    def swap_row(self, source: int, target: int) -> None:
        """Swap two rows."""
        pair, other = [source, target], [target, source]
        self._table[pair] = self._table[other]
        self.num_blocks_per_row[pair] = self.num_blocks_per_row[other]


class MultiGroupBlockTable:
    """One block table per KV cache group."""

    def __init__(self, config: KVCacheConfig, max_num_reqs: int, max_model_len: int) -> None:
        sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        self.block_tables = [BlockTable(size, max_num_reqs, -(-max_model_len // size)) for size in sizes]

    def __getitem__(self, group: int) -> BlockTable:
        return self.block_tables[group]

    def append_row(self, block_ids: BlockIds, row: int) -> None:
        """`BlockTable.append_row` in each group."""
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.append_row(ids, row)

    def add_row(self, block_ids: BlockIds, row: int) -> None:
        """`BlockTable.add_row` in each group."""
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.add_row(ids, row)

    def move_row(self, source: int, target: int) -> None:
        """`BlockTable.move_row` in each group."""
        for table in self.block_tables:
            table.move_row(source, target)

    def swap_row(self, source: int, target: int) -> None:
        """`BlockTable.swap_row` in each group."""
        for table in self.block_tables:
            table.swap_row(source, target)


@dataclass(eq=False, slots=True)
class CachedRequestState:
    """What the runner keeps of a request between steps, in the batch or not.

    Attributes:
        token_ids: Prompt and sampled tokens.
        block_ids: Its blocks, as the scheduler gave them.
    """

    req_id: str
    token_ids: list[int]
    block_ids: BlockIds
    num_computed_tokens: int


class InputBatch:
    """The requests of the running step, row by row.

    Rows stay where they are from step to step; a request that leaves makes a hole, which the next one that
    comes fills, or `condense` closes with the last row.
    """

    def __init__(self, config: KVCacheConfig, max_num_reqs: int, max_model_len: int) -> None:
        self._rows: list[str | None] = []
        self.req_id_to_index: dict[str, int] = {}
        self.num_computed_tokens_cpu: npt.NDArray[np.int32] = np.zeros(max_num_reqs, dtype=np.int32)
        self.block_table = MultiGroupBlockTable(config, max_num_reqs, max_model_len)

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.req_id_to_index)

    @property
    def req_ids(self) -> list[str]:
        """The requests in batch order: the batch's own list; it has no holes once it is condensed."""
        return cast("list[str]", self._rows)

    def add_request(self, state: CachedRequestState) -> None:
        """Put a request into the first hole, or at the end."""
        if None in self._rows:
            row = self._rows.index(None)
        else:
            row = len(self._rows)
            self._rows.append(None)
        self._rows[row] = state.req_id
        self.req_id_to_index[state.req_id] = row
        self.num_computed_tokens_cpu[row] = state.num_computed_tokens
        self.block_table.add_row(state.block_ids, row)

    def remove_request(self, req_id: str) -> None:
        """Take a request out, if it is in; its row becomes a hole."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is not None:
            self._rows[row] = None

    def condense(self) -> None:
        """Close the holes with the last rows."""
        while None in self._rows:
            last = self._rows.pop()
            if last is None:
                continue
            source, target = len(self._rows), self._rows.index(None)
            self._rows[target] = last
            self.req_id_to_index[last] = target
            self.num_computed_tokens_cpu[target] = self.num_computed_tokens_cpu[source]
            self.block_table.move_row(source, target)

    def swap_states(self, i1: int, i2: int) -> None:
        """Swap two rows."""
        first, second = self._rows[i1], self._rows[i2]
        assert first is not None
        assert second is not None
        self._rows[i1], self._rows[i2] = second, first
        self.req_id_to_index[first], self.req_id_to_index[second] = i2, i1
        computed = self.num_computed_tokens_cpu
        computed[i1], computed[i2] = int(computed[i2]), int(computed[i1])
        self.block_table.swap_row(i1, i2)
