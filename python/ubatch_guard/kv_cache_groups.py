"""What the guard has to know of an engine's KV cache groups, read from vLLM's ``KVCacheConfig`` by name.

By name, not by type, so that nothing here imports vLLM and any runner whose specs carry vLLM's names will do.
Facts from vLLM 0.26 to 0.33, ``v1/kv_cache_interface.py`` and ``v1/core/single_type_kv_cache_manager.py``:

- a block-table column of a sharded attention group spans ``block_size`` * decode-context-parallel world size
  tokens (``SingleTypeKVCacheManager.__init__``); ``dcp_sharded`` says whether, where the spec has it;
- ``FullAttentionSpec.sliding_window`` may be the window of *some* layers of the group only (``merge`` drops
  the layers without one), so such a group is read as a whole;
- a Mamba state is never taken from a request of the same step: ``MambaManager.get_num_blocks_to_allocate``
  puts such a request off to the next step. So a Mamba group holds no hazard, and is left out;
- an encoder-only group has no KV cache, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ubatch_guard.step import KVCacheGroup

_WHOLE_PREFIX = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "RSWASpec"})
_NO_HAZARD = frozenset({"MambaSpec", "EncoderOnlyAttentionSpec"})


class UnknownGroupError(ValueError):
    """A KV cache group of a kind that the guard does not understand."""


@dataclass(frozen=True, slots=True)
class EngineGroups:
    """The groups of an engine that can hold a hazard.

    Attributes:
        indices: Their places among the engine's KV cache groups, ascending.
        groups: The groups themselves, one per index.
        are_all: No group of the engine is left out.
    """

    indices: tuple[int, ...]
    groups: tuple[KVCacheGroup, ...]
    are_all: bool = True

    def rows(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
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
        UnknownGroupError: A spec of a kind that is not understood, or layers that read differently in one
            group.
    """
    indices, groups = [], []
    for index, engine_group in enumerate(kv_cache_config.kv_cache_groups):
        spec = engine_group.kv_cache_spec
        # UniformTypeKVCacheSpecs: one spec per layer.
        specs = getattr(spec, "kv_cache_specs", None)
        readings = {
            _read(layer_spec, kv_cache_config.num_blocks, decode_context_parallel_size)
            for layer_spec in (specs.values() if specs else [spec])
        }
        if len(readings) != 1:
            raise UnknownGroupError(f"the layers of KV cache group {index} read it differently: {readings}")
        if (group := readings.pop()) is not None:
            indices.append(index)
            groups.append(group)
    return EngineGroups(
        tuple(indices), tuple(groups), are_all=len(groups) == len(kv_cache_config.kv_cache_groups)
    )


def _read(spec: Any, num_blocks: int, decode_context_parallel_size: int) -> KVCacheGroup | None:
    """How layers of ``spec`` read their group; None: in no way that can be a hazard."""
    kind = type(spec).__name__
    if kind in _NO_HAZARD:
        return None
    sharded = getattr(spec, "dcp_sharded", True)
    tokens_per_column = spec.block_size * (decode_context_parallel_size if sharded else 1)
    if kind in _WHOLE_PREFIX:
        return KVCacheGroup(tokens_per_column, num_blocks)
    if kind == "SlidingWindowSpec":
        return KVCacheGroup(tokens_per_column, num_blocks, sliding_window=spec.sliding_window)
    if kind == "ChunkedLocalAttentionSpec":
        return KVCacheGroup(tokens_per_column, num_blocks, attention_chunk_size=spec.attention_chunk_size)
    raise UnknownGroupError(f"a KV cache group of kind {kind} is not understood")
