"""A slot-by-slot oracle: no spans, no block sets, only slots, tokens and who wrote what when.

It shares no code with the package but the plain data of ``ubatch_guard.step``.
"""

from __future__ import annotations

from typing import NamedTuple

from ubatch_guard.step import Step

Slot = tuple[int, int, int]
"""Group, block, slot within the block."""


class Write(NamedTuple):
    offset: int
    request: int


class Read(NamedTuple):
    offset: int
    request: int
    slot: Slot


def _slot(step: Step, group: int, request: int, position: int) -> Slot | None:
    size = step.groups[group].tokens_per_column
    block = int(step.block_tables[group][request, position // size])
    return None if block == step.groups[group].null_block else (group, block, position % size)


def read_ends(step: Step) -> list[int]:
    """By request, the position up to which it reads what others make, and from which on it writes."""
    ends = step.num_computed_tokens if step.num_read_tokens is None else step.num_read_tokens
    last = step.num_computed_tokens + step.num_scheduled_tokens
    return [min(int(end), int(most)) for end, most in zip(ends, last, strict=True)]


def tokens(step: Step) -> list[tuple[int, int]]:
    """Request and position of every token of the step, by offset."""
    return [
        (request, int(step.num_computed_tokens[request]) + i)
        for request in range(step.num_reqs)
        for i in range(int(step.num_scheduled_tokens[request]))
    ]


def writes(step: Step) -> dict[Slot, list[Write]]:
    """Every write of the step to every slot."""
    result: dict[Slot, list[Write]] = {}
    first = read_ends(step)
    for offset, (request, position) in enumerate(tokens(step)):
        if position < first[request]:
            continue
        for group in range(len(step.groups)):
            slot = _slot(step, group, request, position)
            if slot is not None:
                result.setdefault(slot, []).append(Write(offset, request))
    return result


def reads(step: Step) -> list[Read]:
    """Every slot of its request's prefix that every token of the step attends to.

    What a request reads beyond its computed tokens, every token of it is taken to read.
    """
    result = []
    ends = read_ends(step)
    prompts = ends if step.num_prompt_tokens is None else step.num_prompt_tokens
    for offset, (request, query) in enumerate(tokens(step)):
        settled = 0 if step.num_settled_tokens is None else int(step.num_settled_tokens[request])
        for group, kind in enumerate(step.groups):
            for position in range(settled, ends[request]):
                window = kind.sliding_window
                in_view = kind.prompt_in_view and position < prompts[request]
                if window is not None and query - position >= window and not in_view:
                    continue
                chunk = kind.attention_chunk_size
                if chunk is not None and position <= query and query // chunk != position // chunk:
                    continue
                slot = _slot(step, group, request, position)
                if slot is not None:
                    result.append(Read(offset, request, slot))
    return result


def unsafe_cuts(step: Step) -> set[int]:
    """Every cut that puts a read before another request's write to the slot it reads."""
    written = writes(step)
    return {
        cut
        for read in reads(step)
        for write in written.get(read.slot, ())
        if write.request != read.request
        for cut in range(read.offset + 1, write.offset + 1)
    }


def dependencies(step: Step) -> set[tuple[int, int]]:
    """Reader and writer of every slot that one request reads and another writes."""
    written = writes(step)
    return {
        (read.request, write.request)
        for read in reads(step)
        for write in written.get(read.slot, ())
        if write.request != read.request
    }


def order_exists(step: Step, phases: list[int]) -> bool:
    """Whether writers can go before readers without a descent of phases: by elimination."""
    edges = dependencies(step)
    if any(phases[writer] > phases[reader] for reader, writer in edges):
        return False
    left = set(range(step.num_reqs))
    while left:
        free = {r for r in left if not any(reader == r and writer in left for reader, writer in edges)}
        if not free:
            return False
        left -= free
    return True


class Culprit(NamedTuple):
    reader: int
    writer: int
    group: int
    block: int


def culprit(step: Step, cut: int) -> Culprit:
    """Who makes an unsafe cut unsafe: its first reader, and the last write to what that one reads."""
    written = writes(step)
    pairs = [
        (read, write)
        for read in reads(step)
        for write in written.get(read.slot, ())
        if write.request != read.request
    ]
    reader = min(read.request for read, write in pairs if read.offset < cut <= write.offset)
    of_reader = [(read, write) for read, write in pairs if read.request == reader]
    last = max(write.offset for _, write in of_reader)
    group, block, _ = min(read.slot for read, write in of_reader if write.offset == last)
    writer = next(write.request for _, write in of_reader if write.offset == last)
    return Culprit(reader, writer, group, block)
