"""Blocks: who holds them, what is cached, what is evicted, and when a block is published."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ubatch_guard.engine.block_pool import NULL_BLOCK, BlockPool
from ubatch_guard.engine.config import CacheConfig, ModelConfig
from ubatch_guard.engine.kv_cache import KVCacheConfig, KVCacheManager
from ubatch_guard.engine.request import Request, SamplingParams

BLOCK = 4


def manager(num_blocks: int = 32, window: int | None = None, caching: bool = True) -> KVCacheManager:
    model = ModelConfig()
    if window is not None:
        model = ModelConfig(sliding_window=window, sliding_window_layers=(1,))
    return KVCacheManager(KVCacheConfig.of(model, CacheConfig(BLOCK, num_blocks)), caching)


def request(name: str, token_ids: list[int]) -> Request:
    return Request(name, token_ids, SamplingParams(), BLOCK)


def admit(
    cache: KVCacheManager, new: Request, num_tokens: int | None = None
) -> tuple[int, tuple[list[int], ...]]:
    """Schedule a request as the scheduler does; returns its hit in tokens, and its row per group."""
    computed = cache.get_computed_blocks(new)
    num_tokens = new.num_tokens - computed[1] if num_tokens is None else num_tokens
    rows = cache.allocate_slots(new, num_tokens, computed)
    assert rows is not None
    new.num_computed_tokens = computed[1] + num_tokens
    return computed[1], rows


def test_blocks_are_published_when_they_are_scheduled() -> None:
    """The second request hits blocks whose KV nobody has computed: this is the hazard's source."""
    cache = manager()
    prompt = list(range(10))
    hit, (writer,) = admit(cache, request("writer", prompt))
    assert hit == 0
    hit, (reader,) = admit(cache, request("reader", prompt))
    assert hit == 8
    assert reader[:2] == writer[:2]
    assert reader[2] != writer[2]


def test_only_what_is_scheduled_is_published() -> None:
    cache = manager()
    prompt = list(range(20))
    admit(cache, request("chunked", prompt), num_tokens=9)
    assert cache.get_computed_blocks(request("reader", prompt))[1] == 8


def test_the_last_token_is_never_a_hit() -> None:
    cache = manager()
    prompt = list(range(8))
    admit(cache, request("a", prompt))
    assert cache.get_computed_blocks(request("b", prompt))[1] == 4


def test_equal_blocks_behind_different_prefixes_are_different() -> None:
    cache = manager()
    admit(cache, request("a", [1, 2, 3, 4, 9, 9, 9, 9, 0]))
    assert cache.get_computed_blocks(request("b", [5, 6, 7, 8, 9, 9, 9, 9, 0]))[1] == 0


def test_caching_can_be_switched_off() -> None:
    cache = manager(caching=False)
    admit(cache, request("a", list(range(10))))
    assert cache.get_computed_blocks(request("b", list(range(10))))[1] == 0


def test_freed_blocks_stay_cached_until_they_are_handed_out() -> None:
    cache = manager(num_blocks=5)
    first = request("a", list(range(9)))
    admit(cache, first)
    cache.free(first)
    assert cache.pool.num_free_blocks == 4
    assert cache.get_computed_blocks(request("b", list(range(9))))[1] == 8
    admit(cache, request("c", list(range(50, 58))))  # takes the unused block, and the end of a's row
    assert cache.get_computed_blocks(request("d", list(range(9))))[1] == 8
    admit(cache, request("e", list(range(90, 94))))  # evicts a's second block: its first is worth more
    assert cache.get_computed_blocks(request("f", list(range(9))))[1] == 4


def test_a_hit_that_leaves_too_few_blocks_is_refused() -> None:
    cache = manager(num_blocks=4)
    first = request("a", list(range(9)))
    admit(cache, first)
    cache.free(first)
    # Two of the three free blocks are the hit itself; one is left, two more are wanted.
    second = request("b", [*range(8), *range(70, 75)])
    assert cache.allocate_slots(second, 5, cache.get_computed_blocks(second)) is None
    assert cache.pool.num_free_blocks == 3
    cache.check_integrity()


def test_a_window_group_hits_on_its_window_alone() -> None:
    cache = manager(num_blocks=64, window=5)
    first = request("a", list(range(25)))
    admit(cache, first)
    hit, (full, window) = admit(cache, request("b", list(range(25))))
    assert hit == 24
    assert NULL_BLOCK not in full
    assert window[:5] == [NULL_BLOCK] * 5  # positions 20 .. 23 are in sight of 24
    assert window[5] != NULL_BLOCK


def test_blocks_below_the_window_are_given_back() -> None:
    cache = manager(num_blocks=64, window=5)
    first = request("a", list(range(16)))
    admit(cache, first)
    free = cache.pool.num_free_blocks
    assert cache.allocate_slots(first, 1) is not None
    # Positions 12 .. 15 are in sight of 16: the window group frees 3 blocks, and both groups take one.
    assert cache.pool.num_free_blocks == free + 3 - 2
    cache.check_integrity()


def longest_hit(cached: list[list[bool]], windows: list[int | None], limit: int) -> int:
    """By definition: the longest prefix of which every group has all blocks that the next token sees."""
    for length in range(limit, -1, -1):
        firsts = [0 if w is None else max(0, length * BLOCK - w + 1) // BLOCK for w in windows]
        if all(all(row[first:length]) for row, first in zip(cached, firsts, strict=True)):
            return length
    raise AssertionError


@given(
    full=st.lists(st.booleans(), min_size=9, max_size=9),
    windowed=st.lists(st.booleans(), min_size=9, max_size=9),
    window=st.integers(1, 20),
)
def test_the_longest_hit_is_the_longest(full: list[bool], windowed: list[bool], window: int) -> None:
    cache = manager(num_blocks=64, window=window)
    asked = request("a", list(range(37)))
    for group, row in enumerate((full, windowed)):
        for column, present in enumerate(row):
            if present:
                cache.pool.publish(1 + 10 * group + column, group, asked.block_hashes[column])
    rows, num_tokens = cache.get_computed_blocks(asked)
    assert num_tokens == longest_hit([full, windowed], [None, window], 9) * BLOCK
    assert [len(row) for row in rows] == [num_tokens // BLOCK] * 2


@pytest.mark.parametrize("window", [None, 6])
def test_no_block_is_lost_or_held_twice(window: int | None) -> None:
    rng = random.Random(1)
    cache = manager(num_blocks=24, window=window)
    texts = [[rng.randrange(9) for _ in range(40)] for _ in range(2)]
    live: list[Request] = []
    refused = 0
    for i in range(600):
        if live and rng.random() < 0.4:
            cache.free(live.pop(rng.randrange(len(live))))
        elif live and rng.random() < 0.4:
            grown = rng.choice(live)
            grown.append_output_token(rng.randrange(9))
            if cache.allocate_slots(grown, 1) is None:
                refused += 1
            else:
                grown.num_computed_tokens += 1
        else:
            new = request(f"r{i}", rng.choice(texts)[: rng.randint(1, 40)])
            computed = cache.get_computed_blocks(new)
            if cache.allocate_slots(new, new.num_tokens - computed[1], computed) is None:
                refused += 1
            else:
                new.num_computed_tokens = new.num_tokens
                live.append(new)
        cache.check_integrity()
    assert refused > 0
    for left in live:
        cache.free(left)
    assert cache.pool.num_free_blocks == 23


def test_a_torn_pool_is_noticed() -> None:
    """Negative control of the invariants above."""
    lost = BlockPool(8)
    lost.allocate(2)
    lost._ref_cnt[3] = 0
    lost._ref_cnt[1] = 0
    with pytest.raises(AssertionError, match="lost"):
        lost.check_integrity()
    twice = BlockPool(8)
    twice._ref_cnt[5] = 1
    with pytest.raises(AssertionError, match="held and free"):
        twice.check_integrity()
