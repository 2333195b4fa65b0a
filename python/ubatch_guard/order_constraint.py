"""Which batch orders the attention backends of a runner accept.

By class name, after reading each backend's metadata builder in vLLM 0.32 and 0.33
(``v1/attention/backends/``, ``model_executor/layers/attention/``). A backend that is not listed keeps the
order it was given.

- Builders without a ``reorder_batch_threshold`` take any order.
- Builders with one find the decodes by ``split_decodes_and_prefills``: those before the first longer query.
  A short request behind that is simply treated as a prefill, so the decodes have to lead and the rest is
  free.
- ``split_decodes_prefills_and_extends`` (``AiterFlashAttentionBackend``, and ``FlashAttentionBackend`` under
  decode context parallelism, by ``v1/worker/cp_utils.py``) wants three sections, with the readers of a prefix
  (extends) before its writers (prefills): no order helps there.
"""

from __future__ import annotations

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


def takes_any_order(backend: str) -> bool:
    """Whether a backend, by its class name, takes any order behind its decodes."""
    return backend in _DECODES_MAY_LEAD


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
    is_new: npt.NDArray[np.bool_],
    threshold: int,
) -> npt.NDArray[np.int8]:
    """int8, shape ``[num_reqs]``: `Phase.DECODE` for the requests that have to lead, else `Phase.PREFILL`.

    A decode has run before (it is not in ``is_new``), so its prefix was written in earlier steps, and runs at
    most ``threshold`` tokens. A new request as short as that is none: it may have to follow its writer.
    """
    decode = ~is_new & (num_computed_tokens > 0) & (num_scheduled_tokens <= threshold)
    return np.where(decode, Phase.DECODE, Phase.PREFILL).astype(np.int8)
