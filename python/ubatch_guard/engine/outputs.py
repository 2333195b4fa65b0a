"""What the scheduler tells the runner about a step, and what the runner answers: vLLM's names and shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import SamplingParams

BlockIds = tuple[list[int], ...]
"""Block ids of one request, one list per KV cache group."""


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request that the runner has not seen before."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: BlockIds
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the runner knows; the lists run in parallel.

    Attributes:
        resumed_req_ids: Those that come back after a preemption: their ``new_block_ids`` replace the row.
        new_block_ids: Blocks to add to the ends of the rows; None: none.
        num_computed_tokens: Per request, before this step.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[BlockIds | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
        num_scheduled_tokens: Tokens the step runs, per request id.
        total_num_scheduled_tokens: Their sum.
        finished_req_ids: Requests that finished since the last step.
        preempted_req_ids: Requests whose blocks were taken away in this step.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Tokens sampled in a step; a request whose prompt is not through yet has an empty list."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
