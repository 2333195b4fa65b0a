"""Groups and order constraints by vLLM's names; the specs here have the names and fields of vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from ubatch_guard.kv_cache_groups import UnknownGroupError, read_groups
from ubatch_guard.step import KVCacheGroup, OrderConstraint, Phase


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


