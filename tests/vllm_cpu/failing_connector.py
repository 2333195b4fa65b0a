"""A KV connector whose loads fail: it promises KV for all of a prompt, and reports every block as lost.

Given to vLLM as ``kv_connector_module_path``; under ``kv_load_failure_policy="recompute"`` the scheduler then
has the requests run again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class LostBlocks(KVConnectorMetadata):
    """The blocks that the step was to load."""

    def __init__(self, block_ids: Iterable[int]) -> None:
        self.block_ids = set(block_ids)


class FailingConnector(KVConnectorBase_V1):
    """Promises KV to each request that finds nothing in the prefix cache; there are two, for both roles."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._block_size = self._vllm_config.cache_config.block_size
        self._lost: set[int] = set()

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All whole blocks before the last token, to be loaded in the step itself."""
        whole = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        return (0 if num_computed_tokens else whole), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note what is lost."""
        (block_ids,) = blocks.get_block_ids()
        self._lost |= set(block_ids[: num_external_tokens // self._block_size])

    def build_connector_meta(self, scheduler_output: Any) -> LostBlocks:
        """Tell the worker's side."""
        told = LostBlocks(self._lost)
        self._lost.clear()
        return told

    # The worker's side.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""
        self._lost = self._get_connector_metadata().block_ids

    def get_block_ids_with_load_errors(self) -> set[int]:
        """All that this step was to load."""
        lost, self._lost = self._lost, set()
        return lost

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
