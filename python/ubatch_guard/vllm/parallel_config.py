"""What a runner's ``parallel_config`` says about microbatches: whether, from how many tokens, and where."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ubatch_guard import eligibility
from ubatch_guard.step import IntArray

CUTS = "ubatch_guard_cuts"
"""The attribute by which a runner says its own cuts; see `own_cuts`."""


def microbatches(runner: Any) -> bool:
    """Whether a step may be cut at all, by the configuration as it is in this step."""
    config = getattr(runner, "parallel_config", None)
    if config is None:
        return True
    on = getattr(config, "use_ubatching", None)
    return bool(getattr(config, "enable_dbo", False) if on is None else on)


def num_ubatches(config: Any) -> int:
    """Microbatches of a split step."""
    return max(2, getattr(config, "num_ubatches", 2))


def context_parallel(config: Any, kind: str) -> bool:
    """Whether ``decode`` or ``prefill`` context parallelism is on."""
    return bool(getattr(config, f"{kind}_context_parallel_size", 1) > 1)


def eligible(config: Any, num_tokens: int, num_scheduled_tokens: IntArray, decode_query_len: int) -> bool:
    """Whether the step is large enough to be cut, by the engine's own thresholds."""
    return eligibility.eligible(
        num_tokens,
        num_scheduled_tokens,
        decode_query_len=decode_query_len,
        decode_token_threshold=getattr(config, "dbo_decode_token_threshold", 0),
        prefill_token_threshold=getattr(config, "dbo_prefill_token_threshold", 0),
    )


def too_small(runner: Any, decides: str, num_tokens: int) -> bool:
    """Whether no cut can come, so that nothing has to be looked at.

    vLLM cuts a step only if the tokens of every rank, without their padding, reach a threshold. Of any other
    runner it is not known.

    Args:
        runner: The runner.
        decides: The method in which a runner settles its cut.
        num_tokens: Scheduled tokens of the step.
    """
    config = getattr(runner, "parallel_config", None)
    return (
        num_tokens < getattr(config, "dbo_decode_token_threshold", 0)
        and num_tokens < getattr(config, "dbo_prefill_token_threshold", 0)
        and leaves_cutting_to_vllm(runner, decides)
    )


def leaves_cutting_to_vllm(runner: Any, decides: str) -> bool:
    """Whether the method in which a runner settles its cut is vLLM's own."""
    method = getattr(type(runner), decides, None)
    return method is not None and _is_vllms(method)


def own_cuts(
    runner: Any, decides: str, num_tokens: int, ubatches: int, uniform_query_len: int | None = None
) -> tuple[int, int] | None:
    """First and last cut that the step can get, in tokens; None: any.

    A runner says them itself by an attribute ``ubatch_guard_cuts``: from ``(num_tokens, num_ubatches)`` to
    a `step.CutRange`. vLLM's own runners cut at multiples of ``padded // num_ubatches``, where ``padded``
    is the maximum over the ranks, settled in the vote; a batch of queries of one length above 1 at multiples
    of whole requests (``v1/worker/gpu/ubatch_utils.py``, ``create_ubatch_slices``). Of any other runner it is
    not known.

    Args:
        runner: The runner.
        decides: The method in which a runner settles its cut.
        num_tokens: Scheduled tokens of the step.
        ubatches: Microbatches of a split step.
        uniform_query_len: The one length of all queries; None: they differ.
    """
    if context_parallel(getattr(runner, "parallel_config", None), "prefill"):
        # It deals the tokens out anew after the vote.
        return None
    said = getattr(runner, CUTS, None)
    if said is not None:
        cuts = said(num_tokens, ubatches)
        return cuts.first, cuts.last
    if not leaves_cutting_to_vllm(runner, decides):
        return None
    first = num_tokens // ubatches
    if uniform_query_len is not None and uniform_query_len > 1:
        whole = num_tokens // (uniform_query_len * ubatches) * uniform_query_len
        first = min(first, whole) if whole else first
    return max(1, first), num_tokens - 1


@functools.cache
def _is_vllms(method: Callable[..., Any]) -> bool:
    """Whether a method is vLLM's own, under whatever wrappers."""
    return str(getattr(inspect.unwrap(method), "__module__", "")).startswith("vllm.")
