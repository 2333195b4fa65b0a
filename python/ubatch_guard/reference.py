"""The rule in plain, slow Python, and vLLM's own rule in numpy: what tests and benchmarks compare with.

Nothing here is meant to be fast. :func:`unsafe_cuts` and :func:`order` are the definition of what the Rust
core answers; :func:`vllm_allows` is the baseline that the core replaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ubatch_guard._core import BlockIdError, DtypeError, GroupError, ShapeError, TokenCountError
from ubatch_guard.step import CutRange, IntArray, KVCacheGroup, Step, UnsafeCuts


class _Write(NamedTuple):
    """A run of slots of one block that one request writes in the step."""

    writer: int
    first_slot: int
    last_slot: int
    last_offset: int
    """Token offset of the write to ``last_slot``; the slots before it are written by the tokens before it."""


class _Conflict(NamedTuple):
    """The last write by another request to a slot of one block that a reader reads."""

    offset: int
    writer: int
    group: int
    block: int


class _Request(NamedTuple):
    """A request of the step with the token offset of its first scheduled token."""

    position: int
    first_offset: int
    num_computed: int
    num_scheduled: int
    num_settled: int
    num_read: int
    """The positions below it are read; those from it on are written."""
    num_prompt: int


def unsafe_cuts(step: Step, cuts: CutRange | None = None) -> tuple[UnsafeCuts, ...]:
    """The unsafe cuts of a step: maximal ranges, ascending, each with a culprit.

    A cut K is unsafe when a token with an offset below K reads a KV slot that another request's token with an
    offset of K or more writes.

    Args:
        step: The step.
        cuts: Only these cuts; None: every cut of the step.

    Returns:
        The ranges, clipped to ``cuts``. The culprit of a range is, of the readers that make its first cut
        unsafe, the one that comes first in the batch, with the last of all writes to what it reads.

    Raises:
        GuardError: The step cannot be: see the subclasses in :mod:`ubatch_guard`.
    """
    requests = _requests(step)
    found: list[tuple[_Request, _Conflict]] = []
    for reader, conflicts in _conflicts(step, requests):
        # max() keeps the first of equals, and conflicts ascend by group and column.
        last = max(conflicts, key=lambda conflict: conflict.offset)
        if last.offset > reader.first_offset:
            found.append((reader, last))

    merged: list[CutRange] = []
    for reader, last in found:
        if merged and reader.first_offset + 1 <= merged[-1].last + 1:
            merged[-1] = CutRange(merged[-1].first, max(merged[-1].last, last.offset))
        else:
            merged.append(CutRange(reader.first_offset + 1, last.offset))

    result = []
    for whole in merged:
        part = whole if cuts is None else CutRange(max(whole.first, cuts.first), min(whole.last, cuts.last))
        if not len(part):
            continue
        reader, last = next(pair for pair in found if pair[0].first_offset < part.first <= pair[1].offset)
        result.append(UnsafeCuts(part.first, part.last, reader.position, last.writer, last.group, last.block))
    return tuple(result)


def last_writes(step: Step) -> dict[tuple[int, int], int]:
    """Who reads whom, and until when the writer has still to write what is read.

    Returns:
        By pair ``(reader, writer)`` of batch positions, the token offset of the last write by the writer to a
        slot that the reader reads. The pair is the wrong way round at the cuts from one above the reader's
        first token offset up to this one.

    Raises:
        GuardError: As :func:`unsafe_cuts`.
    """
    last: dict[tuple[int, int], int] = {}
    for reader, conflicts in _conflicts(step, _requests(step)):
        for conflict in conflicts:
            pair = reader.position, conflict.writer
            last[pair] = max(last.get(pair, 0), conflict.offset)
    return last


def dependencies(step: Step) -> frozenset[tuple[int, int]]:
    """The pairs ``(reader, writer)`` of batch positions: the reader reads a slot that the writer writes.

    Raises:
        GuardError: As :func:`unsafe_cuts`.
    """
    return frozenset(last_writes(step))


def order(step: Step, phases: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """A batch order with every writer before its readers, in which no cut is unsafe.

    Args:
        step: The step.
        phases: One :class:`~ubatch_guard.step.Phase` per request; in the order found they do not descend.
            None: the order is free.

    Returns:
        ``order[i]`` is the batch position of the request that goes to position i; None where there is no
        such order, because of a cycle or because a writer's phase lies above its reader's. Of the requests
        that can come next, the one with the lowest phase, then the lowest position, does.

    Raises:
        GuardError: As :func:`unsafe_cuts`.
    """
    level = [0] * step.num_reqs if phases is None else [int(phase) for phase in phases]
    if len(level) != step.num_reqs:
        raise ShapeError(f"{len(level)} phases for {step.num_reqs} requests")
    waits_for: dict[int, set[int]] = {position: set() for position in range(step.num_reqs)}
    for reader, writer in dependencies(step):
        if level[writer] > level[reader]:
            return None
        waits_for[reader].add(writer)

    result: list[int] = []
    while waits_for:
        ready = [position for position, writers in waits_for.items() if not writers]
        if not ready:
            return None
        chosen = min(ready, key=lambda position: (level[position], position))
        result.append(chosen)
        del waits_for[chosen]
        for writers in waits_for.values():
            writers.discard(chosen)
    return tuple(result)


def vllm_allows(step: Step, decode_threshold: int | None) -> bool:
    """Whether vLLM's own guard (since PR #51402, vLLM 0.32) lets the step be microbatched.

    Its rule: a request with computed tokens and more than ``decode_threshold`` scheduled ones is a reader;
    the step is refused when one of the whole blocks below a reader's computed tokens is among the blocks that
    any request writes. It asks neither where the cut lies, nor whether the reader comes after the writer, nor
    for windows and null blocks. A column is taken to span ``tokens_per_column`` tokens; vLLM takes
    ``block_size``, which is less under context parallelism.

    Args:
        step: The step, its block tables as vLLM has them.
        decode_threshold: The runner's ``reorder_batch_threshold``; None and 0 count as 1.
    """
    num_reqs = step.num_reqs
    if num_reqs < 2:
        return True
    computed = step.num_computed_tokens
    scheduled = step.num_scheduled_tokens
    readers = np.flatnonzero((computed > 0) & (scheduled > (decode_threshold or 1)))
    if not len(readers):
        return True
    for group, table in zip(step.groups, step.block_tables, strict=True):
        size = group.tokens_per_column
        first = computed // size
        lengths = -(-(computed + scheduled) // size) - first
        rows = np.repeat(np.arange(num_reqs), lengths)
        # Per request first, first + 1, ...: a running number less where the request's run of it begins.
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths - first, lengths)
        written = np.unique(table[rows, np.minimum(columns, table.shape[1] - 1)])
        for reader, whole in zip(readers.tolist(), first[readers].tolist(), strict=True):
            if np.isin(table[reader, :whole], written).any():
                return False
    return True


def _conflicts(step: Step, requests: Sequence[_Request]) -> list[tuple[_Request, list[_Conflict]]]:
    """Per request that reads what others write, in batch order: the conflicts, by group and column."""
    conflicts: dict[int, list[_Conflict]] = {}
    for index, (group, table) in enumerate(zip(step.groups, step.block_tables, strict=True)):
        written = _writes(group, table, requests)
        for reader in requests:
            for positions in _reads(group, reader):
                for column, block in _blocks(group, table, reader.position, positions):
                    first_slot, last_slot = _slots(group, positions, column)
                    for write in written.get(block, ()):
                        last_common = min(last_slot, write.last_slot)
                        if write.writer == reader.position or max(first_slot, write.first_slot) > last_common:
                            continue
                        offset = write.last_offset - (write.last_slot - last_common)
                        conflict = _Conflict(offset, write.writer, index, block)
                        conflicts.setdefault(reader.position, []).append(conflict)
    return [(request, conflicts[request.position]) for request in requests if request.position in conflicts]


def _writes(group: KVCacheGroup, table: IntArray, requests: Sequence[_Request]) -> dict[int, list[_Write]]:
    """What the step writes into each block of the group."""
    written: dict[int, list[_Write]] = {}
    for writer in requests:
        positions = range(writer.num_read, writer.num_computed + writer.num_scheduled)
        for column, block in _blocks(group, table, writer.position, positions):
            first_slot, last_slot = _slots(group, positions, column)
            last_position = column * group.tokens_per_column + last_slot
            last_offset = writer.first_offset + last_position - writer.num_computed
            written.setdefault(block, []).append(_Write(writer.position, first_slot, last_slot, last_offset))
    return written


def _reads(group: KVCacheGroup, reader: _Request) -> tuple[range, range]:
    """The positions of others' making that the reader attends to: of its prompt, and of the rest."""
    first = 0
    if group.sliding_window is not None:
        first = max(0, reader.num_computed - group.sliding_window + 1)
    elif group.attention_chunk_size is not None:
        first = reader.num_computed // group.attention_chunk_size * group.attention_chunk_size
    end_of_prompt = min(reader.num_prompt, first) if group.prompt_in_view else 0
    return range(reader.num_settled, end_of_prompt), range(max(first, reader.num_settled), reader.num_read)


def _columns(group: KVCacheGroup, positions: range) -> range:
    """The block-table columns of a range of token positions."""
    if not positions:
        return range(0)
    return range(positions[0] // group.tokens_per_column, positions[-1] // group.tokens_per_column + 1)


def _slots(group: KVCacheGroup, positions: range, column: int) -> tuple[int, int]:
    """The first and the last slot that a range of token positions has in a column's block."""
    start = column * group.tokens_per_column
    return max(positions[0] - start, 0), min(positions[-1] - start, group.tokens_per_column - 1)


def _blocks(
    group: KVCacheGroup, table: IntArray, position: int, positions: range
) -> Iterator[tuple[int, int]]:
    """The columns of a range of a request's token positions with their blocks, but for null blocks."""
    columns = _columns(group, positions)
    for column, block in zip(columns, table[position, columns.start : columns.stop].tolist(), strict=True):
        if block == group.null_block:
            continue
        if not 0 <= block < group.num_blocks:
            raise BlockIdError(
                f"request {position} has block {block} in column {column}, not in 0..{group.num_blocks - 1}"
            )
        yield column, block


def _requests(step: Step) -> tuple[_Request, ...]:
    """The requests of a step that run at least one token; everything but the block ids is checked here."""
    _check_groups(step)
    counts = [step.num_computed_tokens, step.num_scheduled_tokens]
    counts.append(
        np.zeros_like(step.num_computed_tokens)
        if step.num_settled_tokens is None
        else step.num_settled_tokens
    )
    counts.append(step.num_computed_tokens if step.num_read_tokens is None else step.num_read_tokens)
    all_prompt = np.full(step.num_reqs, np.iinfo(np.int32).max, dtype=np.int32)
    counts.append(all_prompt if step.num_prompt_tokens is None else step.num_prompt_tokens)
    for count in counts:
        _check_dtype(count)
        if count.shape != (step.num_reqs,):
            raise ShapeError(f"token counts of shape {count.shape} for {step.num_reqs} requests")
        if np.any(count < 0):
            raise TokenCountError(f"token count {int(count.min())} is negative")
    for table in step.block_tables:
        _check_dtype(table)
        if table.ndim != 2 or table.shape[0] < step.num_reqs:
            raise ShapeError(f"block table of shape {table.shape} for {step.num_reqs} requests")

    requests = []
    offset = 0
    for position in range(step.num_reqs):
        computed, scheduled, settled, read, prompt = (int(count[position]) for count in counts)
        if read < computed:
            raise TokenCountError(
                f"request {position} reads {read} tokens, fewer than its {computed} computed"
            )
        if scheduled:
            # Nobody reads beyond its own tokens.
            last = min(read, computed + scheduled)
            requests.append(_Request(position, offset, computed, scheduled, settled, last, prompt))
        offset += scheduled
        if max(offset, computed + scheduled, settled, read, prompt) > np.iinfo(np.int32).max:
            raise TokenCountError(f"the token counts of request {position} leave 31 bits")
        for group, table in zip(step.groups, step.block_tables, strict=True):
            needed = len(_columns(group, range(computed + scheduled)))
            if needed > table.shape[1]:
                raise ShapeError(f"request {position} needs {needed} columns, its row has {table.shape[1]}")
    return tuple(requests)


def _check_groups(step: Step) -> None:
    if len(step.groups) != len(step.block_tables):
        raise ShapeError(f"{len(step.block_tables)} block tables for {len(step.groups)} groups")
    for group in step.groups:
        if group.tokens_per_column < 1 or group.num_blocks < 1:
            raise GroupError(f"no tokens per column or no blocks: {group}")
        if group.sliding_window is not None and group.attention_chunk_size is not None:
            raise GroupError(f"both a sliding window and a chunk: {group}")
        if group.prompt_in_view and group.sliding_window is None:
            raise GroupError(f"the prompt in view without a sliding window: {group}")
        if group.sliding_window is not None and group.sliding_window < 1:
            raise GroupError(f"sliding window below 1: {group}")
        if group.attention_chunk_size is not None and group.attention_chunk_size < 1:
            raise GroupError(f"attention chunk below 1: {group}")


def _check_dtype(array: IntArray) -> None:
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise DtypeError(f"dtype {array.dtype}; int32 or int64 is needed")
