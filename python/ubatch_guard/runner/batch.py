"""A step as a runner is about to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ubatch_guard.step import IntArray, OrderConstraint


@dataclass(slots=True)
class Batch:
    """A step as the runner is about to run it, in batch order.

    Attributes:
        req_ids: The requests.
        num_computed_tokens: int32 or int64, shape ``[num_reqs]``.
        num_scheduled_tokens: int32 or int64, shape ``[num_reqs]``.
        num_ubatches: Microbatches of a split step.
        cuts: First and last cut that the vote can end in, in tokens; None: any cut of the step.
        decode_threshold: Longest query that the attention backends run as a decode as long as it stands
            before the first longer one, in tokens; None: they do not care.
        decode_query_len: Tokens of a decode with all of its drafts.
        order_constraint: Asked only when the step has an unsafe cut.
        eligible: The engine's own thresholds let it cut this step.
        refusal: Why a step that some request may read this step's writes in is voted "no" on whatever its
            order is; None: nothing.
        unsure: Why the rows do not tell whether the step is safe as it stands; None: they do.
        as_scheduled: The order in which the scheduler took the requests, as batch positions, where that order
            is known to be safe by itself (docs/scheduler-order.md); asked when the rows find none.
    """

    req_ids: Sequence[str]
    num_computed_tokens: IntArray
    num_scheduled_tokens: IntArray
    num_ubatches: int
    cuts: tuple[int, int] | None
    decode_threshold: int | None
    decode_query_len: int
    order_constraint: Callable[[], OrderConstraint]
    eligible: bool
    refusal: str | None = None
    unsure: str | None = None
    as_scheduled: Callable[[], Sequence[int]] | None = None
