"""Which blocks a request gets: one row of blocks per KV cache group, prefix hits first.

Full blocks are published to the prefix cache when they are *scheduled*, before their KV is computed, as vLLM
does: the next request of the same step can hit them. Run whole, a step writes all KV of a layer before it
reads any, and the hit holds. This is where the hazard of a cut step comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from .block_pool import NULL_BLOCK, BlockPool
from .config import CacheConfig, ModelConfig
from .outputs import BlockIds
from .request import Request


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Cache of layers that attend to the whole prefix; ``block_size`` in tokens."""

    block_size: int

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading positions that no token from ``num_computed_tokens`` on can see."""
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """Cache of layers whose query at position p attends to ``p - sliding_window + 1 .. p``."""

    block_size: int
    sliding_window: int

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading positions that no token from ``num_computed_tokens`` on can see."""
        return max(0, num_computed_tokens - self.sliding_window + 1)


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share a block table."""

    layer_names: tuple[str, ...]
    kv_cache_spec: FullAttentionSpec | SlidingWindowSpec


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The groups and their one pool of ``num_blocks`` block ids."""

    num_blocks: int
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]

    @classmethod
    def of(cls, model: ModelConfig, cache: CacheConfig) -> KVCacheConfig:
        """Layers with full attention first, then those with a window; a group that is empty is left out."""
        windowed = [layer in model.sliding_window_layers for layer in range(model.num_hidden_layers)]
        groups = []
        if not all(windowed):
            names = tuple(str(layer) for layer, flag in enumerate(windowed) if not flag)
            groups.append(KVCacheGroupSpec(names, FullAttentionSpec(cache.block_size)))
        if model.sliding_window is not None:
            names = tuple(str(layer) for layer, flag in enumerate(windowed) if flag)
            spec = SlidingWindowSpec(cache.block_size, model.sliding_window)
            groups.append(KVCacheGroupSpec(names, spec))
        return cls(cache.num_blocks, tuple(groups))


class KVCacheManager:
    """Gives requests blocks, takes them back and knows what is cached."""

    def __init__(self, config: KVCacheConfig, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(config.num_blocks)
        self._specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._block_size = self._specs[0].block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._rows: dict[str, BlockIds] = {}
        self._num_published: dict[str, int] = {}

    def get_computed_blocks(self, request: Request) -> tuple[BlockIds, int]:
        """The cached prefix of a request that holds no blocks: a row per group, and its length in tokens.

        The last token is never taken from the cache: its logits are wanted.
        """
        num_blocks = (request.num_tokens - 1) // self._block_size if self._enable_prefix_caching else 0
        while True:  # until all groups agree on a length; it only shrinks
            hits = [self._longest_hit(group, request, num_blocks) for group in range(len(self._specs))]
            if min(hits) == num_blocks:
                break
            num_blocks = min(hits)
        rows: list[list[int]] = []
        for group in range(len(self._specs)):
            skipped = self._num_skipped_blocks(group, num_blocks * self._block_size)
            row = [NULL_BLOCK] * skipped
            for block_hash in request.block_hashes[skipped:num_blocks]:
                block = self.pool.cached_block(group, block_hash)
                assert block is not None
                row.append(block)
            rows.append(row)
        return tuple(rows), num_blocks * self._block_size

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed: tuple[BlockIds, int] | None = None
    ) -> BlockIds | None:
        """Blocks for the next ``num_new_tokens`` tokens of a request.

        Args:
            request: Its ``num_computed_tokens`` are before the step.
            num_new_tokens: Tokens to schedule.
            computed: What `get_computed_blocks` answered, for a request that holds no blocks.

        Returns:
            The blocks added per group (the cached ones included), or None: there are not enough free blocks.
        """
        if computed is None:
            hits: BlockIds = tuple([] for _ in self._specs)
            num_computed = request.num_computed_tokens
            self._free_skipped_blocks(request, num_computed)
        else:
            hits, num_computed = computed
        num_columns = -(-(num_computed + num_new_tokens) // self._block_size)
        rows = self._rows.get(request.req_id, tuple([] for _ in self._specs))
        wanted = [num_columns - len(row) - len(hit) for row, hit in zip(rows, hits, strict=True)]
        free_hits = {block for hit in hits for block in hit if self.pool.is_free(block)}
        if sum(wanted) > self.pool.num_free_blocks - len(free_hits):
            return None

        for hit in hits:
            self.pool.touch(hit)
        added = tuple(hit + self.pool.allocate(count) for hit, count in zip(hits, wanted, strict=True))
        for row, new in zip(rows, added, strict=True):
            row.extend(new)
        self._rows[request.req_id] = rows
        self._publish(request, num_computed + num_new_tokens)
        return added

    def free(self, request: Request) -> None:
        """Take all blocks back; the end of the row is evicted first, as prefixes are worth more."""
        for row in self._rows.pop(request.req_id, ()):
            self.pool.free(reversed(row))
        self._num_published.pop(request.req_id, None)

    def check_integrity(self) -> None:
        """Assert that the pool is whole, and that all its blocks are free if no request is left."""
        self.pool.check_integrity()

    def _num_skipped_blocks(self, group: int, num_computed_tokens: int) -> int:
        """Leading blocks that no token from ``num_computed_tokens`` on can see."""
        return self._specs[group].num_skipped_tokens(num_computed_tokens) // self._block_size

    def _longest_hit(self, group: int, request: Request, num_blocks: int) -> int:
        """The most leading blocks, at most ``num_blocks``, of which all that can be seen are cached."""
        if isinstance(self._specs[group], FullAttentionSpec):
            hashes = request.block_hashes
            misses = (
                column
                for column in range(num_blocks)
                if self.pool.cached_block(group, hashes[column]) is None
            )
            return next(misses, num_blocks)
        length = num_blocks
        column = num_blocks - 1
        while column >= self._num_skipped_blocks(group, length * self._block_size):
            if self.pool.cached_block(group, request.block_hashes[column]) is None:
                length = column  # every longer prefix sees this block too
            column -= 1
        return length

    def _free_skipped_blocks(self, request: Request, num_computed_tokens: int) -> None:
        for group, row in enumerate(self._rows[request.req_id]):
            skipped = self._num_skipped_blocks(group, num_computed_tokens)
            self.pool.free(row[:skipped])
            row[:skipped] = [NULL_BLOCK] * skipped

    def _publish(self, request: Request, num_tokens: int) -> None:
        """Publish the blocks that are full once the step that is being scheduled has run."""
        if not self._enable_prefix_caching:
            return
        first = self._num_published.get(request.req_id, 0)
        last = min(num_tokens, request.num_tokens) // self._block_size
        for group, row in enumerate(self._rows[request.req_id]):
            for column in range(first, last):
                self.pool.publish(row[column], group, request.block_hashes[column])
        self._num_published[request.req_id] = last
