"""From requests to steps: the scheduler and the block pool of the embedded engine, and a clock.

No model runs. A request generates as many tokens as its log says, and what it generates is in nobody's
prefix: a log does not say which prompt continues which answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ubatch_guard.engine.config import SchedulerConfig
from ubatch_guard.engine.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    SlidingWindowSpec,
)
from ubatch_guard.engine.outputs import BlockIds, ModelRunnerOutput, SchedulerOutput
from ubatch_guard.engine.request import Request, SamplingParams
from ubatch_guard.engine.scheduler import Scheduler
from ubatch_guard.simulate.requests import LoggedRequest
from ubatch_guard.trace.format import TraceHeader
from ubatch_guard.trace.records import Admission, Appended, Changes, StepRecord

SOURCE = "ubatch-guard simulate"
_NO_PARAMS = SamplingParams()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine that is simulated; names and defaults are vLLM's where it has them.

    Attributes:
        max_num_seqs: Most requests of a step.
        max_num_batched_tokens: Most tokens of a step.
        block_size: Tokens of a KV block.
        num_gpu_blocks: Blocks of the pool, the null block among them.
        enable_prefix_caching: Whether prompts share blocks.
        sliding_window: Window in tokens of a second KV cache group; None: there is none.
        num_ubatches: Microbatches of a step.
        sort_batch: Order a step as Model Runner V2 does: decodes first, then by length. Otherwise as
            scheduled.
        step_ms: Time of a step in milliseconds, whatever is in it.
        ms_per_1k_tokens: Time of a thousand tokens of a step in milliseconds.
        speed_up: Requests arrive that many times as fast as the log says.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    num_gpu_blocks: int = 32768
    enable_prefix_caching: bool = True
    sliding_window: int | None = None
    num_ubatches: int = 2
    sort_batch: bool = True
    step_ms: float = 15.0
    ms_per_1k_tokens: float = 40.0
    speed_up: float = 1.0

    def header(self, workload: str) -> TraceHeader:
        """The header of the trace of such an engine."""
        windows: tuple[int | None, ...] = (None,)
        if self.sliding_window is not None:
            windows = (None, self.sliding_window)
        return TraceHeader(
            block_sizes=(self.block_size,) * len(windows),
            sliding_windows=windows,
            num_blocks=self.num_gpu_blocks,
            decode_threshold=None,
            num_ubatches=self.num_ubatches,
            max_num_batched_tokens=self.max_num_batched_tokens,
            workload=workload,
            options={"max_num_seqs": self.max_num_seqs, "sort_batch": self.sort_batch},
            source=SOURCE,
        )


class TooLargeError(ValueError):
    """A request that the pool could not hold even alone."""


@dataclass(slots=True)
class SimulationStats:
    """What was scheduled.

    Attributes:
        requests: Requests admitted.
        finished: Requests that finished.
        preemptions: How often a request lost its blocks.
        prompt_tokens: Of the requests admitted.
        cached_tokens: Those of them found in the prefix cache.
        simulated_s: Time on the simulated clock, in seconds.
    """

    requests: int = 0
    finished: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    simulated_s: float = 0.0


class _SimulatedRequest(Request):
    """A request with keys in place of tokens."""

    __slots__ = ("_num_output_tokens", "_num_tokens")

    def __init__(self, logged: LoggedRequest, block_size: int) -> None:
        self.req_id = logged.request_id
        self.prompt_token_ids = []
        self.sampling_params = _NO_PARAMS
        self.block_size = block_size
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.block_hashes = logged.block_keys
        self._num_tokens = logged.num_prompt_tokens
        self._num_output_tokens = logged.num_output_tokens

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def is_finished(self) -> bool:
        return self._num_output_tokens == 0

    def append_output_token(self, token_id: int) -> None:
        self._num_output_tokens -= 1
        self._num_tokens += 1
        if self._num_tokens % self.block_size == 0:
            self.block_hashes.append(f"{self.req_id}/{self._num_tokens}".encode())


class Simulation:
    """The steps of an engine that serves some requests; iterate once.

    Only as many requests are taken from the log as can be admitted next: they are served first come, first
    served, so that those behind them change nothing, and a long log needs no memory.

    Args:
        requests: In order of arrival.
        options: The engine.

    Raises:
        TooLargeError: While iterating.
    """

    def __init__(self, requests: Iterable[LoggedRequest], options: EngineOptions) -> None:
        self.stats = SimulationStats()
        self._options = options
        self._requests = iter(requests)
        self._next = next(self._requests, None)
        groups = [KVCacheGroupSpec((), FullAttentionSpec(options.block_size))]
        if options.sliding_window is not None:
            groups.append(KVCacheGroupSpec((), SlidingWindowSpec(options.block_size, options.sliding_window)))
        self._num_groups = len(groups)
        manager = KVCacheManager(
            KVCacheConfig(options.num_gpu_blocks, tuple(groups)), options.enable_prefix_caching
        )
        self._scheduler = Scheduler(
            SchedulerConfig(options.max_num_seqs, options.max_num_batched_tokens), manager
        )
        self._live: dict[str, _SimulatedRequest] = {}
        self._rows: dict[str, BlockIds] = {}
        self._now_ms = 0.0

    def __iter__(self) -> Iterator[StepRecord]:
        scheduler = self._scheduler
        while True:
            if not scheduler.has_unfinished_requests:
                if self._next is None:
                    return
                self._now_ms = max(self._now_ms, self._next.arrival_ms / self._options.speed_up)
            self._admit()
            output = scheduler.schedule()
            yield self._record(output)
            self._finish(output)
            tokens = output.total_num_scheduled_tokens
            self._now_ms += self._options.step_ms + self._options.ms_per_1k_tokens * tokens / 1000
            self.stats.simulated_s = self._now_ms / 1000

    def _admit(self) -> None:
        """Queue the requests that have arrived, as far as this step could take them."""
        while self._next is not None and self._next.arrival_ms / self._options.speed_up <= self._now_ms:
            if len(self._scheduler.waiting) >= self._options.max_num_seqs:
                return
            logged, self._next = self._next, next(self._requests, None)
            tokens = logged.num_prompt_tokens + logged.num_output_tokens
            needed = -(-tokens // self._options.block_size) * self._num_groups
            if needed >= self._options.num_gpu_blocks:
                raise TooLargeError(
                    f"request {logged.request_id} has {tokens:,} tokens, which take {needed:,} blocks; the "
                    f"pool has {self._options.num_gpu_blocks - 1:,}: see --num-gpu-blocks"
                )
            request = _SimulatedRequest(logged, self._options.block_size)
            self._live[request.req_id] = request
            self._scheduler.add_request(request)
            self.stats.requests += 1
            self.stats.prompt_tokens += logged.num_prompt_tokens

    def _record(self, output: SchedulerOutput) -> StepRecord:
        """The step as a trace has it; the rows here are brought up to date."""
        rows, cached = self._rows, output.scheduled_cached_reqs
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            rows.pop(request_id, None)
        self.stats.preemptions += len(output.preempted_req_ids)
        new = [
            Admission(entry.req_id, entry.num_computed_tokens, entry.block_ids)
            for entry in output.scheduled_new_reqs
        ]
        computed = {entry.request_id: entry.num_computed_tokens for entry in new}
        self.stats.cached_tokens += sum(computed.values())
        resumed: list[Admission] = []
        grown: list[str] = []
        added: list[BlockIds] = []
        for request_id, blocks, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[request_id] = num_computed_tokens
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                resumed.append(Admission(request_id, num_computed_tokens, blocks))
            elif blocks is not None:
                grown.append(request_id)
                added.append(blocks)
                for row, more in zip(rows[request_id], blocks, strict=True):
                    row.extend(more)
        for admission in (*new, *resumed):
            rows[admission.request_id] = tuple(list(row) for row in admission.rows)
        scheduled = output.num_scheduled_tokens
        batch = list(scheduled)
        if self._options.sort_batch:
            # vllm/v1/worker/gpu/model_runner.py (0.34), sort_batch_req_ids, without drafts.
            batch.sort(key=lambda request_id: (scheduled[request_id] != 1, scheduled[request_id]))
        return StepRecord(
            Changes(
                finished=sorted(output.finished_req_ids),
                preempted=sorted(output.preempted_req_ids),
                new=new,
                resumed=resumed,
                appended=Appended(grown, added),
            ),
            batch,
            np.array([computed[request_id] for request_id in batch], np.int32),
            np.array([scheduled[request_id] for request_id in batch], np.int32),
            vllm_allows=self._old_rule_allows(computed, scheduled),
        )

    def _old_rule_allows(self, computed: dict[str, int], scheduled: dict[str, int]) -> bool:
        """VLLM's rule of 0.28 to 0.33, as `ubatch_guard.reference.vllm_allows` has it on block tables."""
        size = self._options.block_size
        readers = [name for name, count in scheduled.items() if count > 1 and computed[name]]
        if not readers or len(scheduled) < 2:
            return True
        for group in range(self._num_groups):
            written: set[int] = set()
            for name, count in scheduled.items():
                first, last = computed[name] // size, -(-(computed[name] + count) // size)
                written.update(self._rows[name][group][first:last])
            for name in readers:
                if not written.isdisjoint(self._rows[name][group][: computed[name] // size]):
                    return False
        return True

    def _finish(self, output: SchedulerOutput) -> None:
        """Give a token to each request whose tokens are all computed."""
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self._live[request_id]
            sampled.append([0] if request.num_computed_tokens == request.num_tokens else [])
        for finished in self._scheduler.update_from_output(ModelRunnerOutput(ids, sampled)):
            del self._live[finished.req_id]
            self.stats.finished += 1
