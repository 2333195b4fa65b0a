"""What stands in every slot of a KV cache, without a model: the key of the token prefix it was written for.

The KV of a position depends on all tokens up to it, so a slot is right for a position if it was written for
the same prefix. That tells, position by position, what each request of a step reads: what stood there before,
what another request of the step writes, or something wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Slot = tuple[int, int, int]
"""KV cache group, block, offset in the block."""


def prefix_key(before: int, token: int) -> int:
    """The key of a prefix, from the key of the one that is a token shorter (0 for none)."""
    return hash((before, token))


def prefix_keys(tokens: Sequence[int], before: int = 0) -> list[int]:
    """The key of the prefix that ends at each of the tokens."""
    keys = []
    for token in tokens:
        before = prefix_key(before, token)
        keys.append(before)
    return keys


@dataclass(slots=True)
class Row:
    """A request as a model runner keeps it.

    Attributes:
        tokens: All tokens known, those of the prompt first.
        num_computed_tokens: Positions whose KV is taken for written.
        block_ids: Per KV cache group the blocks of its positions, from position 0 on.
    """

    tokens: list[int]
    num_computed_tokens: int
    block_ids: list[list[int]]
    _keys: list[int] = field(default_factory=list)

    def keys(self) -> list[int]:
        """The key of the prefix that ends at each token."""
        if len(self._keys) < len(self.tokens):
            self._keys += prefix_keys(self.tokens[len(self._keys) :], self._keys[-1] if self._keys else 0)
        return self._keys


@dataclass(frozen=True, slots=True)
class Sharing:
    """A request needs what another one writes in the same step, at a position of its prefix."""

    reader: str
    writer: str
    group: int
    position: int


@dataclass(slots=True)
class Reads:
    """What the requests of a step read.

    Attributes:
        num_reads: Positions looked at, over all requests and groups.
        sharing: One entry per pair of requests, its last position.
        wrong: Positions that are wrong even if the whole step is written before any of it is read, as
            (request, group, position).
    """

    num_reads: int
    sharing: list[Sharing]
    wrong: list[tuple[str, int, int]]


class SlotContents:
    """The slots of a KV cache.

    Args:
        block_size: Tokens per block.
        windows: Per KV cache group its sliding window in tokens, None for full attention.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None]) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self._keys: dict[Slot, int | None] = {}

    def slots(self, row: Row, position: int) -> list[Slot]:
        """The slots of a position, one per group."""
        column, offset = divmod(position, self.block_size)
        return [(group, block_ids[column], offset) for group, block_ids in enumerate(row.block_ids)]

    def write(self, slot: Slot, key: int | None) -> None:
        """Write a slot; None is right for no prefix."""
        self._keys[slot] = key

    def reads(self, rows: Mapping[str, Row], writes: Mapping[Slot, tuple[str, int | None]]) -> Reads:
        """What the requests read in a step that writes ``writes`` (slot to request and key).

        A request reads the prefix that its first query sees; what a later query sees beyond it is its own.
        """
        found = Reads(0, [], [])
        for reader, row in rows.items():
            keys, end = row.keys(), row.num_computed_tokens
            pairs: dict[str, Sharing] = {}
            for group, (window, block_ids) in enumerate(zip(self.windows, row.block_ids, strict=True)):
                start = 0 if window is None else max(0, end - window + 1)
                found.num_reads += end - start
                for position in range(start, end):
                    column, offset = divmod(position, self.block_size)
                    slot = (group, block_ids[column], offset)
                    key = self._keys.get(slot)
                    writer, written = writes.get(slot, (reader, key))
                    if written != keys[position]:
                        found.wrong.append((reader, group, position))
                    elif writer != reader and key != written:
                        pairs[writer] = Sharing(reader, writer, group, position)
            found.sharing += pairs.values()
        return found
