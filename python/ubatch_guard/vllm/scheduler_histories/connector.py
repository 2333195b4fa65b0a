"""A KV connector that loads made-up prefixes; vLLM imports it by its path.

Only the scheduler's side is there: the histories have no worker, they look at `MadeUpConnector.started`
themselves.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class Load:
    """Positions ``start`` to ``end`` of a request whose KV is to be loaded, and where to."""

    request_id: str
    tokens: list[int]
    block_ids: list[list[int]]
    start: int
    end: int


class MadeUpConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Promises a random number of blocks to half of the requests.

    Attributes:
        rng: Where the numbers come from; set before the first step.
        share_asynchronous: Of the loads, the share that is done between steps instead of in one.
        started: Loads that the step being scheduled begins with; emptied by who does them.
        under_way: Asynchronous loads by request, removed by who ends them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rng = random.Random(0)
        self.share_asynchronous = 0.0
        self.started: list[Load] = []
        self.under_way: dict[str, Load] = {}
        self._promises: dict[str, tuple[int, int, bool]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Whole blocks behind the local hit; a token is left to compute."""
        block_size = self._vllm_config.cache_config.block_size
        room = (request.num_tokens - 1 - num_computed_tokens) // block_size
        if room <= 0 or self.rng.random() < 0.5:
            return 0, False
        promised = block_size * self.rng.randint(1, room)
        asynchronous = self.rng.random() < self.share_asynchronous
        self._promises[request.request_id] = (num_computed_tokens, promised, asynchronous)
        return promised, asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take the blocks that the promise is to be kept in."""
        if not num_external_tokens:
            return
        start, promised, asynchronous = self._promises[request.request_id]
        load = Load(
            request.request_id,
            list(request.all_token_ids),
            [list(block_ids) for block_ids in blocks.get_block_ids()],
            start,
            start + promised,
        )
        if asynchronous:
            self.under_way[load.request_id] = load
        else:
            self.started.append(load)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing: there is no worker to tell."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Nothing is saved."""
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Nothing is saved."""
        return False, None

    # The worker's side, which vLLM asks every connector to have.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Not called."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Not called."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Not called."""

    def wait_for_save(self) -> None:
        """Not called."""
