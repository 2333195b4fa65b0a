"""A check at the cut itself: from the block tables and slot mappings that a cut step really runs with.

Independent of everything that was planned: no block of the scheduler's, no order, no rule about who may read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ubatch_guard.step import IntArray, KVCacheGroup

Finding = tuple[int, int, int, int, int]
"""Group (place), cut in tokens, reader, writer (batch positions), block id."""


def first_read_of_a_later_write(
    query_start_loc: IntArray,
    seq_lens: IntArray,
    cuts: Sequence[int],
    groups: Sequence[tuple[KVCacheGroup, int, Any, Any]],
) -> Finding | None:
    """The first slot that a microbatch reads and a later one writes; None: there is none.

    Args:
        query_start_loc: On the host, shape ``[num_reqs + 1]``: first token offset of each request; the end.
        seq_lens: On the host, shape ``[num_reqs]``: tokens of each request after the step.
        cuts: Token offsets at which the later microbatches begin.
        groups: Per KV cache group: how it is read; tokens in a block of the table; the block table, shape
            ``[>= num_reqs, columns]``; the slot of each token, shape ``[>= num_tokens]``, negative for none.
            Tables and slots may be tensors on a device, and are copied to the host.
    """
    num_reqs, num_tokens = len(seq_lens), int(query_start_loc[-1])
    begins, ends = query_start_loc[:-1], query_start_loc[1:]
    computed = seq_lens - (ends - begins)
    for place, (group, block_size, block_table, slot_mapping) in enumerate(groups):
        slots = _on_host(slot_mapping[:num_tokens])
        for cut in cuts:
            later = np.flatnonzero(slots[cut:] >= 0) + cut if cut < num_tokens else slots[:0]
            readers = np.flatnonzero((begins < cut) & (begins < ends))
            if not len(later) or not len(readers):
                continue
            # Written slots, ascending, each with the token that writes it last.
            written, last = np.unique(slots[later][::-1], return_index=True)
            writer_token = later[::-1][last]
            stops = computed[readers] + np.minimum(ends[readers], cut) - begins[readers]
            columns = -(-int(stops.max()) // block_size)
            table = _on_host(block_table[:num_reqs, :columns])
            rows = _rows_with(table, np.unique(written // block_size), readers)
            for reader, column, block in rows:
                start = column * block_size
                first = max(start, _first_read(group, int(computed[reader])))
                stop = min(
                    start + block_size, int(computed[reader] + min(ends[reader], cut) - begins[reader])
                )
                low = np.searchsorted(written, block * block_size + first - start)
                high = np.searchsorted(written, block * block_size + stop - start)
                # The table may be of smaller blocks than the scheduler hands out.
                is_null = block * block_size // group.tokens_per_column == group.null_block
                if first < stop and low < high and not is_null:
                    token = int(writer_token[low])
                    writer = int(np.searchsorted(query_start_loc, token, side="right")) - 1
                    return place, cut, reader, writer, block
    return None


def _first_read(group: KVCacheGroup, num_computed_tokens: int) -> int:
    """First position that a request's first query reads."""
    if group.sliding_window is not None:
        return max(0, num_computed_tokens - group.sliding_window + 1)
    if group.attention_chunk_size is not None:
        return num_computed_tokens // group.attention_chunk_size * group.attention_chunk_size
    return 0


def _rows_with(
    block_table: IntArray, blocks: IntArray, readers: npt.NDArray[np.intp]
) -> list[tuple[int, int, int]]:
    """Reader, column and block wherever one of ``blocks`` stands in a reader's row."""
    rows = block_table[readers]
    hits = np.isin(rows, blocks)
    return [
        (int(readers[row]), int(column), int(block))
        for (row, column), block in zip(np.argwhere(hits).tolist(), rows[hits].tolist(), strict=True)
    ]


def _on_host(values: Any) -> IntArray:
    array: IntArray = values if isinstance(values, np.ndarray) else values.cpu().numpy()
    return array
