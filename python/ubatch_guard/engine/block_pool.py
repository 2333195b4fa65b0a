"""KV blocks: reference counts, the prefix cache's index, least-recently-used eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0
"""Id of the block that holds no data: it fills the columns below a sliding window."""


class BlockPool:
    """All blocks of the cache, shared by the KV cache groups.

    A block is *free* when no request holds it. A free block keeps its content, and can be found through its
    hash, until it is handed out again: the one free longest goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; the null block and one more are the least")
        self._ref_cnt = [0] * num_blocks
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._cached: dict[tuple[int, bytes], int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Whether no request holds the block."""
        return block in self._free

    def cached_block(self, group: int, block_hash: bytes) -> int | None:
        """The block that holds this content in this group, or None."""
        return self._cached.get((group, block_hash))

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` free blocks; what they held leaves the prefix cache.

        The caller has looked at `num_free_blocks`.
        """
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._cached[key]
            self._ref_cnt[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more request holds each of these cached blocks."""
        for block in blocks:
            if block != NULL_BLOCK:
                self._free.pop(block, None)
                self._ref_cnt[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One request fewer holds each of these; those named first are evicted first."""
        for block in blocks:
            if block != NULL_BLOCK:
                self._ref_cnt[block] -= 1
                if self._ref_cnt[block] == 0:
                    self._free[block] = None

    def publish(self, block: int, group: int, block_hash: bytes) -> None:
        """Let other requests find the block; a content that is cached already stays where it is."""
        key = (group, block_hash)
        if block != NULL_BLOCK and block not in self._key_of and key not in self._cached:
            self._key_of[block] = key
            self._cached[key] = block

    def check_integrity(self) -> None:
        """Assert the invariants; the engine calls this when it is idle."""
        held = {block for block, count in enumerate(self._ref_cnt) if count}
        assert held.isdisjoint(self._free), "a block is held and free"
        assert len(held) + len(self._free) == len(self._ref_cnt) - 1, "a block is lost"
        assert {key: block for block, key in self._key_of.items()} == self._cached, "the prefix index is torn"
