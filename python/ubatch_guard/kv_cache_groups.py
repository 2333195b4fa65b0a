"""What the guard has to know of an engine's KV cache groups, read from vLLM's ``KVCacheConfig`` by name.

By name, not by type, so that nothing here imports vLLM and any runner whose specs carry vLLM's names will do.
Facts from vLLM 0.26 to 0.34, ``v1/kv_cache_interface.py`` and ``v1/core/single_type_kv_cache_manager.py``:

- a block-table column of a sharded attention group spans ``block_size`` * decode-context-parallel world size
  tokens (``SingleTypeKVCacheManager.__init__``); ``dcp_sharded`` says whether, where the spec has it;
- ``FullAttentionSpec.sliding_window`` may be the window of *some* layers of the group only (``merge`` drops
  the layers without one), so such a group is read as a whole;
- a spec that is not ``prefix_cacheable`` (0.34) has blocks of its own for every request: nobody reads
  another's. The same goes for a cross-attention group (``CrossAttentionManager`` publishes nothing) and for
  draft layers, which run whole, after the microbatches of the target
  (``v1/worker/gpu/spec_decode/speculator.py``);
- a Mamba state is never taken from a request of the same step: ``MambaManager.get_num_blocks_to_allocate``
  puts such a request off to the next step. So a Mamba group holds no hazard, and is left out;
- an encoder-only group has no KV cache, and is left out;
- a group of compressed entries (``tokens_per_state``) is tight by token positions: an entry is written with
  its last token, and prefix hits are whole blocks. States of a compressor are a window of positions.

A group of a kind that is not known counts as one that is read as a whole: it may cost a needless move, and in
a guard that only vetoes a step, but never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ubatch_guard.step import IntArray, KVCacheGroup

_WHOLE_PREFIX = frozenset(
    {
        "FullAttentionSpec",
        "HiddenStateCacheSpec",
        "MLAAttentionSpec",
        "RSWASpec",
        "SinkFullAttentionSpec",
    }
)
# New requests have no generated tokens yet, so that of R-SWA they read the whole prefix too.
_WINDOW = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
_NO_HAZARD = frozenset(
    {
        "CircularBufferSpec",
        "CrossAttentionSpec",
        "EncoderOnlyAttentionSpec",
        "HiSparseHotSpec",
        "HiSparseResidentSpec",
        "MambaSpec",
    }
)


class UnknownGroupError(ValueError):
    """A KV cache group that cannot be told apart into columns."""


@dataclass(frozen=True, slots=True)
class EngineGroups:
    """The groups of an engine that can hold a hazard.

    Attributes:
        indices: Their places among the engine's KV cache groups, ascending.
        groups: The groups themselves, one per index.
        are_all: No group of the engine is left out.
        assumed: Kinds that are not known, and taken to be read as a whole.
    """

    indices: tuple[int, ...]
    groups: tuple[KVCacheGroup, ...]
    are_all: bool = True
    assumed: tuple[str, ...] = ()

    def rows(self, block_ids: Sequence[Sequence[int] | IntArray]) -> Sequence[Sequence[int] | IntArray]:
        """Of one row of block ids per engine group, those of ``groups``."""
        if self.are_all:
            return block_ids
        return [block_ids[index] for index in self.indices]


def read_groups(kv_cache_config: Any, decode_context_parallel_size: int = 1) -> EngineGroups:
    """The groups of a ``KVCacheConfig``.

    Args:
        kv_cache_config: Has ``num_blocks`` and ``kv_cache_groups``, each with a ``kv_cache_spec``.
        decode_context_parallel_size: Ranks over which a sharded group's tokens are spread.

    Raises:
        UnknownGroupError: Layers of one group whose columns span different numbers of tokens.
    """
    indices, groups, assumed = [], [], set()
    for index, engine_group in enumerate(kv_cache_config.kv_cache_groups):
        spec = engine_group.kv_cache_spec
        # UniformTypeKVCacheSpecs: one spec per layer.
        layer_specs = getattr(spec, "kv_cache_specs", None)
        readings = []
        for layer_spec in layer_specs.values() if layer_specs else [spec]:
            if not _holds_hazard(layer_spec, bool(layer_specs)):
                continue
            readings.append(_read(layer_spec, kv_cache_config.num_blocks, decode_context_parallel_size))
            if type(layer_spec).__name__ not in _WHOLE_PREFIX | _WINDOW | {"ChunkedLocalAttentionSpec"}:
                assumed.add(type(layer_spec).__name__)
        if readings:
            indices.append(index)
            groups.append(_widest(readings, index))
    return EngineGroups(
        tuple(indices),
        tuple(groups),
        are_all=len(groups) == len(kv_cache_config.kv_cache_groups),
        assumed=tuple(sorted(assumed)),
    )


def _holds_hazard(spec: Any, is_layer: bool) -> bool:
    if type(spec).__name__ in _NO_HAZARD or not getattr(spec, "prefix_cacheable", True):
        return False
    # A merged spec does not say for which of its layers it speaks.
    return not (is_layer and getattr(spec, "is_draft", False))


def _read(spec: Any, num_blocks: int, decode_context_parallel_size: int) -> KVCacheGroup:
    """How a layer of ``spec`` reads its group."""
    kind = type(spec).__name__
    sharded = getattr(spec, "dcp_sharded", True)
    tokens_per_column = spec.block_size * (decode_context_parallel_size if sharded else 1)
    if kind in _WINDOW:
        return KVCacheGroup(tokens_per_column, num_blocks, sliding_window=spec.sliding_window)
    if kind == "ChunkedLocalAttentionSpec":
        return KVCacheGroup(tokens_per_column, num_blocks, attention_chunk_size=spec.attention_chunk_size)
    return KVCacheGroup(tokens_per_column, num_blocks)


def _widest(readings: list[KVCacheGroup], index: int) -> KVCacheGroup:
    """What all layers of a group read together: every one reads from somewhere up to where it stands."""
    spans = {reading.tokens_per_column for reading in readings}
    if len(spans) > 1:
        raise UnknownGroupError(f"the columns of KV cache group {index} span {sorted(spans)} tokens")
    windows = [reading.sliding_window for reading in readings]
    if len(set(readings)) == 1:
        return readings[0]
    if None not in windows:
        return max(readings, key=lambda reading: reading.sliding_window or 0)
    return KVCacheGroup(readings[0].tokens_per_column, readings[0].num_blocks)
