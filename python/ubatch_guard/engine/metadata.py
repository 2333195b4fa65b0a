"""Turns rows of the batch into what attention needs: slots to write, slots to read, masks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .forward_context import AttentionMetadata, RequestSpan
from .input_batch import BlockTable

_NO_SLOTS: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
"""Leads every concatenation, so that an idle rank, which has no request, has one too."""


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """The queries of one request in one microbatch, on the host.

    Attributes:
        row: Row of the request in the batch.
        start: First query, as a row of the microbatch.
        stop: One past the last.
        position: Token position of the first query in the request.
    """

    req_id: str
    row: int
    start: int
    stop: int
    position: int


def query_spans(
    req_ids: list[str],
    num_computed_tokens: npt.NDArray[np.int32],
    num_scheduled_tokens: npt.NDArray[np.int32],
    start: int,
    stop: int,
) -> list[QuerySpan]:
    """The queries of each request among the tokens ``start .. stop - 1`` of a step."""
    spans = []
    offset = 0  # of the request's first token in the step
    for row, (req_id, length) in enumerate(zip(req_ids, num_scheduled_tokens.tolist(), strict=True)):
        first, last = max(offset, start), min(offset + length, stop)
        if first < last:
            position = int(num_computed_tokens[row]) + first - offset
            spans.append(QuerySpan(req_id, row, first - start, last - start, position))
        offset += length
    return spans


def slots_of(table: BlockTable, row: int, first: int, last: int) -> npt.NDArray[np.int64]:
    """KV slots of the positions ``first .. last - 1`` of a request."""
    positions = np.arange(first, last)
    blocks = table.get_numpy_array()[row, positions // table.block_size].astype(np.int64)
    slots: npt.NDArray[np.int64] = blocks * table.block_size + positions % table.block_size
    return slots


def build_slot_mapping(spans: list[QuerySpan], table: BlockTable, device: torch.device) -> Tensor:
    """int64, shape ``[num_tokens]``: the slot that each query's KV is written to."""
    slots = [
        slots_of(table, span.row, span.position, span.position + span.stop - span.start) for span in spans
    ]
    return torch.from_numpy(np.concatenate([_NO_SLOTS, *slots])).to(device)


def build_attention_metadata(
    spans: list[QuerySpan], table: BlockTable, sliding_window: int | None, device: torch.device
) -> AttentionMetadata:
    """The metadata of one microbatch for the layers of one KV cache group."""
    firsts, seen = [], []
    for span in spans:
        first = 0 if sliding_window is None else max(0, span.position - sliding_window + 1)
        firsts.append(first)
        seen.append(slots_of(table, span.row, first, span.position + span.stop - span.start))
    # One copy to the device for all requests, cut into views there.
    lengths = [len(slots) for slots in seen]
    all_seen = torch.from_numpy(np.concatenate([_NO_SLOTS, *seen])).to(device).split_with_sizes(lengths)
    request_spans = [
        RequestSpan(
            span.req_id, span.start, span.stop, first, slots, _mask(span, len(slots), sliding_window, device)
        )
        for span, first, slots in zip(spans, firsts, all_seen, strict=True)
    ]
    return AttentionMetadata(build_slot_mapping(spans, table, device), request_spans)


def _mask(span: QuerySpan, num_seen: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Causal, and no further back than the window; the last query sees the last slot."""
    num_queries = span.stop - span.start
    if num_queries == 1:
        return None
    last = num_seen - num_queries
    mask = torch.ones(num_queries, num_seen, dtype=torch.bool, device=device).tril_(last)
    return mask if sliding_window is None else mask.triu_(last - sliding_window + 1)
