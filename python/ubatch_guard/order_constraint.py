"""Which batch orders the attention backends of a runner accept.

By class name, after reading each backend's metadata builder in vLLM 0.32 and 0.33
(``v1/attention/backends/``, ``model_executor/layers/attention/``). A backend that is not listed keeps the
order it was given.

- Builders without a ``reorder_batch_threshold`` take any order.
- Builders with one find the decodes by ``split_decodes_and_prefills``: those before the first longer query.
  A short request behind that is simply treated as a prefill, so the decodes have to lead and the rest is
  free.
- A backend for chunked local attention is made from another one, whose builder gets the chunks of a request
  as requests, in the order of the batch (``make_local_attention_virtual_batches``): what the other takes goes
  for it as well.
- ``split_decodes_prefills_and_extends`` (``AiterFlashAttentionBackend``, and ``FlashAttentionBackend`` under
  decode context parallelism, by ``v1/worker/cp_utils.py``) wants three sections, with the readers of a prefix
  (extends) before its writers (prefills): no order helps there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ubatch_guard.step import IntArray, OrderConstraint, Phase

_DECODES_MAY_LEAD = frozenset(
    {
        "AMXMLABackend",
        "AiterMLABackend",
        "AiterTritonMLABackend",
        "CPUAttentionBackend",
        "CPUMLABackend",
        "CutlassMLABackend",
        "FlashAttentionBackend",
        "FlashAttnMLABackend",
        "FlashInferBackend",
        "FlashInferMLABackend",
        "FlashMLABackend",
        "FlexAttentionBackend",
        "Mamba1AttentionBackend",
        "Mamba2AttentionBackend",
        "RocmAiterUnifiedAttentionBackend",
        "RocmAttentionBackend",
        "TokenspeedMLABackend",
        "TritonAttentionBackend",
        "TritonMLABackend",
    }
)
"""Backends that take any order, or any order behind their decodes."""

_CHUNKED_LOCAL = re.compile(r"^ChunkedLocalAttention_\d+_")
"""How a backend that was made from another one is named: this, and the other's name."""


def takes_any_order(backend: str) -> bool:
    """Whether a backend, by its class name, takes any order behind its decodes."""
    return _CHUNKED_LOCAL.sub("", backend) in _DECODES_MAY_LEAD


def order_constraint(
    backends: Iterable[Any], reorder_batch_threshold: int | None, context_parallel: bool = False
) -> OrderConstraint:
    """The constraint of all ``backends`` together.

    Args:
        backends: The attention backend classes in use.
        reorder_batch_threshold: vLLM's: the longest query that counts as a decode; None: the backends do not
            care.
        context_parallel: Decode or prefill context parallelism is on.
    """
    if context_parallel or not all(takes_any_order(backend.__name__) for backend in backends):
        return OrderConstraint.FIXED
    return OrderConstraint.FREE if reorder_batch_threshold is None else OrderConstraint.DECODES_LEAD


def decode_phases(
    num_computed_tokens: IntArray,
    num_scheduled_tokens: IntArray,
    may_read: npt.NDArray[np.bool_],
    threshold: int,
) -> npt.NDArray[np.int8]:
    """int8, shape ``[num_reqs]``: `Phase.DECODE` for the requests that have to lead, else `Phase.PREFILL`.

    A decode runs at most ``threshold`` tokens, and its prefix was written in earlier steps. A request as
    short as that which ``may_read`` what is written in this step (it is new, or set back by a failed KV load)
    is none: it may have to follow its writer.
    """
    decode = ~may_read & (num_computed_tokens > 0) & (num_scheduled_tokens <= threshold)
    return np.where(decode, Phase.DECODE, Phase.PREFILL).astype(np.int8)
