"""What a forward pass needs besides the weights: KV tensors, attention metadata, the microbatch it is.

It is handed from module to module as an argument. Microbatches run in threads of one process, so a context
kept in a global would be the wrong one half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .sanitizer import Sanitizer
from .streams import Send


class PagedKVCache:
    """Keys and values of one layer: shape ``[num_blocks * block_size, num_key_value_heads, head_dim]`` each.

    Slot ``block * block_size + offset`` holds a token. The memory starts as zeros, and a block keeps what its
    last owner wrote until its next owner writes.
    """

    def __init__(
        self, layer: int, num_slots: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layer = layer
        self.keys = torch.zeros(num_slots, heads, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, sanitizer: Sanitizer | None) -> None:
        """Store the KV of ``len(slots)`` tokens."""
        self.keys[slots] = keys
        self.values[slots] = values
        if sanitizer is not None:
            sanitizer.on_write(self.layer, slots)

    def read(self, span: RequestSpan, sanitizer: Sanitizer | None) -> tuple[Tensor, Tensor]:
        """The KV that a request's queries see: shape ``[num_seen, num_key_value_heads, head_dim]`` each."""
        if sanitizer is not None:
            sanitizer.on_read(self.layer, span.req_id, span.first_seen, span.slots)
        return self.keys[span.slots], self.values[span.slots]


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """The queries of one request in one microbatch, and what they attend to.

    Attributes:
        start: Row of its first query in the microbatch.
        stop: One past its last.
        first_seen: First token position that any of the queries sees.
        slots: int64, shape ``[num_seen]``: slots of the positions ``first_seen`` to that of the last query.
        mask: bool, shape ``[num_queries, num_seen]``, True where a query sees a position; None: all see all.
    """

    req_id: str
    start: int
    stop: int
    first_seen: int
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One microbatch, as the layers of one KV cache group see it.

    Attributes:
        slot_mapping: int64, shape ``[num_actual_tokens]``: the slot each token's KV is written to. Tokens
            after these are padding: not written, not attended.
        spans: The requests, in batch order.
    """

    slot_mapping: Tensor
    spans: list[RequestSpan]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The surroundings of one forward pass over a whole step or one microbatch.

    Attributes:
        attention: Per layer, the metadata of its KV cache group.
        kv_caches: Per layer.
        num_actual_tokens: Tokens that are no padding.
        overlap: Makes a transfer and returns what it brought; a microbatch lets the next one run meanwhile.
        sanitizer: Or None: nobody watches.
    """

    attention: list[AttentionMetadata]
    kv_caches: list[PagedKVCache]
    num_actual_tokens: int
    overlap: Callable[[Send], Tensor]
    sanitizer: Sanitizer | None = None
