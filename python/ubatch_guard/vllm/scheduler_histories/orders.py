"""Batch orders that the histories judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Order = Callable[[Any, list[str]], Sequence[str]]
"""``order(scheduler_output, ids in vLLM's order) -> ids``; asked about every scheduler output, also empty."""
MakeOrder = Callable[[Any, Any], Order]
"""Makes the order of a history, from its ``VllmConfig`` and ``KVCacheConfig``."""


def new_request_ids(scheduler_output: Any) -> set[str]:
    """New and resumed requests, whatever the release calls the latter: their rows come with this step."""
    resumed = getattr(scheduler_output.scheduled_cached_reqs, "resumed_req_ids", ())
    return {request.req_id for request in scheduler_output.scheduled_new_reqs}.union(resumed)


def running_first(scheduler_output: Any, ids: list[str]) -> list[str]:
    """Running requests in vLLM's order, then the new ones as the scheduler took them."""
    new = new_request_ids(scheduler_output)
    return [r for r in ids if r not in new] + [r for r in scheduler_output.num_scheduled_tokens if r in new]


ORDERS: dict[str, MakeOrder] = {
    "vllm": lambda vllm_config, kv_cache_config: lambda scheduler_output, ids: ids,
    "as_scheduled": lambda vllm_config, kv_cache_config: (
        lambda scheduler_output, ids: list(scheduler_output.num_scheduled_tokens)
    ),
    "running_first": lambda vllm_config, kv_cache_config: running_first,
}
