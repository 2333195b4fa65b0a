"""KV cache groups by vLLM's names; the specs here have the names and fields of vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from ubatch_guard.kv_cache_groups import UnknownGroupError, read_groups
from ubatch_guard.step import KVCacheGroup


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    sliding_window: int | None = None
    dcp_sharded: bool = True


class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class SlidingWindowSpec:
    block_size: int = 16
    sliding_window: int = 100


@dataclass
class SlidingWindowMLASpec(SlidingWindowSpec):
    prefix_cacheable: bool = True


@dataclass
class ChunkedLocalAttentionSpec:
    block_size: int = 32
    attention_chunk_size: int = 512


@dataclass
class MambaSpec:
    block_size: int = 1024


class EncoderOnlyAttentionSpec(FullAttentionSpec):
    pass


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class HiddenStateCacheSpec(MLAAttentionSpec):
    pass


class CrossAttentionSpec(FullAttentionSpec):
    pass


class CircularBufferSpec(FullAttentionSpec):
    pass


class StrangeSpec(FullAttentionSpec):
    pass


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, object] = field(default_factory=dict)


def config(*specs: object) -> SimpleNamespace:
    return SimpleNamespace(
        num_blocks=50, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    )


def test_kinds() -> None:
    read = read_groups(
        config(FullAttentionSpec(), SlidingWindowSpec(), ChunkedLocalAttentionSpec(), MLAAttentionSpec())
    )
    assert read.indices == (0, 1, 2, 3)
    assert read.groups == (
        KVCacheGroup(16, 50),
        KVCacheGroup(16, 50, sliding_window=100),
        KVCacheGroup(32, 50, attention_chunk_size=512),
        KVCacheGroup(16, 50),
    )


def test_a_window_in_a_full_group_may_be_that_of_some_layers_only() -> None:
    assert read_groups(config(FullAttentionSpec(sliding_window=64))).groups == (KVCacheGroup(16, 50),)


def test_groups_without_a_hazard_are_left_out_of_rows() -> None:
    read = read_groups(config(MambaSpec(), FullAttentionSpec(), EncoderOnlyAttentionSpec()))
    assert read.indices == (1,)
    assert list(read.rows(([1], [2, 3], []))) == [[2, 3]]


def test_a_column_spans_the_context_parallel_ranks() -> None:
    sharded, replicated = FullAttentionSpec(), FullAttentionSpec(dcp_sharded=False)
    read = read_groups(config(sharded, replicated), decode_context_parallel_size=4)
    assert [group.tokens_per_column for group in read.groups] == [64, 16]


def test_layers_of_one_kind() -> None:
    layers = {"a": FullAttentionSpec(), "b": MLAAttentionSpec()}
    assert read_groups(config(UniformTypeKVCacheSpecs(layers))).groups == (KVCacheGroup(16, 50),)


def test_deepseek_v4() -> None:
    """Compressed MLA, windowed MLA, and the compressor's states, which are windows of positions."""
    read = read_groups(
        config(
            MLAAttentionSpec(block_size=256),
            SlidingWindowMLASpec(block_size=64, sliding_window=128),
            SlidingWindowMLASpec(block_size=4, sliding_window=8),
            SlidingWindowMLASpec(block_size=8, sliding_window=128),
        )
    )
    assert read.groups == (
        KVCacheGroup(256, 50),
        KVCacheGroup(64, 50, sliding_window=128),
        KVCacheGroup(4, 50, sliding_window=8),
        KVCacheGroup(8, 50, sliding_window=128),
    )
    assert not read.assumed


def test_blocks_that_are_never_shared_hold_no_hazard() -> None:
    replayed = SlidingWindowMLASpec(prefix_cacheable=False)
    read = read_groups(config(CircularBufferSpec(), CrossAttentionSpec(), replayed, FullAttentionSpec()))
    assert read.indices == (3,)


def test_layers_of_a_draft_model_run_whole() -> None:
    drafting = SlidingWindowSpec()
    drafting.is_draft = True
    both = UniformTypeKVCacheSpecs({"target": SlidingWindowSpec(sliding_window=7), "draft": drafting})
    assert read_groups(config(both)).groups == (KVCacheGroup(16, 50, sliding_window=7),)
    assert read_groups(config(UniformTypeKVCacheSpecs({"draft": drafting}))).indices == ()


@pytest.mark.parametrize(
    ("layers", "group"),
    [
        (
            [SlidingWindowSpec(), SlidingWindowSpec(sliding_window=7)],
            KVCacheGroup(16, 50, sliding_window=100),
        ),
        ([SlidingWindowSpec(), SinkFullAttentionSpec()], KVCacheGroup(16, 50)),
        ([SinkFullAttentionSpec(), HiddenStateCacheSpec()], KVCacheGroup(16, 50)),
    ],
)
def test_layers_that_read_differently_count_as_the_widest(layers: list[object], group: KVCacheGroup) -> None:
    spec = UniformTypeKVCacheSpecs(dict(enumerate(layers)))
    assert read_groups(config(spec)).groups == (group,)


def test_a_kind_that_is_not_known_counts_as_read_as_a_whole() -> None:
    read = read_groups(config(StrangeSpec(block_size=32)))
    assert read.groups == (KVCacheGroup(32, 50),)
    assert read.assumed == ("StrangeSpec",)


def test_layers_whose_columns_differ_are_refused() -> None:
    layers = UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": FullAttentionSpec(block_size=32)})
    with pytest.raises(UnknownGroupError, match=r"\[16, 32\]"):
        read_groups(config(FullAttentionSpec(), layers))
