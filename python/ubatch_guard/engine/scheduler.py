"""Which requests run in a step, and how many tokens of each.

Continuous batching, first come first served: running requests first, then waiting ones as long as tokens and
blocks last. A prompt longer than the token budget runs in chunks. When blocks run out, the request that came
last is preempted: it loses its blocks and computes them again later.
"""

from __future__ import annotations

from collections import deque

from .config import SchedulerConfig
from .kv_cache import KVCacheManager
from .outputs import BlockIds, ModelRunnerOutput, NewRequestData, SchedulerOutput
from .request import Request


class Scheduler:
    """The queue of waiting requests and the list of running ones."""

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.kv_cache_manager = kv_cache_manager
        self._config = config
        self._requests: dict[str, Request] = {}
        self._finished_req_ids: set[str] = set()

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: A request of that id is under way.
        """
        if request.req_id in self._requests:
            raise ValueError(f"request {request.req_id} is under way already")
        self._requests[request.req_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Decide on the next step.

        Raises:
            RuntimeError: The cache is too small for the only request that is left to run.
        """
        output = SchedulerOutput(finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = set()
        budget = self._schedule_running(output, self._config.max_num_batched_tokens)
        if not output.preempted_req_ids:  # what was just freed goes to those that run
            self._schedule_waiting(output, budget)
        if self.has_unfinished_requests and not output.num_scheduled_tokens:
            raise RuntimeError("the KV cache is too small for a request to make progress")

        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            self._requests[req_id].num_computed_tokens += num_tokens
        return output

    def update_from_output(self, output: ModelRunnerOutput) -> list[Request]:
        """Take the sampled tokens; returns the requests that finished."""
        finished = []
        for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            request = self._requests[req_id]
            for token_id in token_ids:
                request.append_output_token(token_id)
            if request.is_finished:
                finished.append(request)
                self.running.remove(request)
                self.kv_cache_manager.free(request)
                self._finished_req_ids.add(req_id)
                del self._requests[req_id]
        return finished

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Schedule the running requests, the oldest first; returns the token budget that is left."""
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            while new_blocks is None and (victim := self.running.pop()) is not request:
                self._preempt(victim, output)
                new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            if new_blocks is None:
                self._preempt(request, output)
                break
            self._schedule_cached(output, request, num_new_tokens, new_blocks if any(new_blocks) else None)
            budget -= num_new_tokens
            index += 1
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit waiting requests in the order they came, until tokens, blocks or places run out."""
        while self.waiting and budget and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            computed = self.kv_cache_manager.get_computed_blocks(request)
            num_new_tokens = min(request.num_tokens - computed[1], budget)
            blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens, computed)
            if blocks is None:
                break
            self.running.append(self.waiting.popleft())
            request.num_computed_tokens = computed[1]
            if request.num_preemptions:
                output.scheduled_cached_reqs.resumed_req_ids.add(request.req_id)
                self._schedule_cached(output, request, num_new_tokens, blocks)
            else:
                self._schedule_new(output, request, num_new_tokens, blocks)
            budget -= num_new_tokens

    def _schedule_new(
        self, output: SchedulerOutput, request: Request, num_new_tokens: int, blocks: BlockIds
    ) -> None:
        output.num_scheduled_tokens[request.req_id] = num_new_tokens
        output.scheduled_new_reqs.append(
            NewRequestData(
                request.req_id,
                request.prompt_token_ids,
                request.sampling_params,
                blocks,
                request.num_computed_tokens,
            )
        )

    def _schedule_cached(
        self, output: SchedulerOutput, request: Request, num_new_tokens: int, blocks: BlockIds | None
    ) -> None:
        output.num_scheduled_tokens[request.req_id] = num_new_tokens
        cached = output.scheduled_cached_reqs
        cached.req_ids.append(request.req_id)
        cached.new_block_ids.append(blocks)
        cached.num_computed_tokens.append(request.num_computed_tokens)

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Take a request's blocks away; it waits at the head of the queue."""
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        output.preempted_req_ids.add(request.req_id)
        self.waiting.appendleft(request)
