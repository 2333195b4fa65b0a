"""Scheduler and runner in a loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .config import EngineConfig
from .kv_cache import KVCacheManager
from .model import DecoderModel
from .parallel import Ranks
from .request import Request, SamplingParams
from .runner import Runner, StepReport
from .sanitizer import UnwrittenRead
from .scheduler import Scheduler
from .weights import load_checkpoint, random_model
from .workloads import WorkloadRequest


@dataclass(slots=True)
class EngineStats:
    """Steps and what became of them.

    Attributes:
        steps: Steps that ran tokens on some rank.
        idle_steps: Of those, without tokens on this rank.
        eligible: Of those, large enough to be cut.
        split: Cut.
        unwritten_reads: KV slots read before they were written, over all layers.
        unsafe_steps: Steps with such a read.
        first_unsafe: Number of the first such step and its reads; None: there was none.
    """

    steps: int = 0
    idle_steps: int = 0
    eligible: int = 0
    split: int = 0
    unwritten_reads: int = 0
    unsafe_steps: int = 0
    first_unsafe: tuple[int, tuple[UnwrittenRead, ...]] | None = None

    def add(self, report: StepReport) -> None:
        """Count a step."""
        if report.unwritten_reads and self.first_unsafe is None:
            self.first_unsafe = (self.steps, report.unwritten_reads)
        self.steps += 1
        self.idle_steps += not report.num_tokens
        self.eligible += report.eligible
        self.split += bool(report.cuts)
        self.unwritten_reads += len(report.unwritten_reads)
        self.unsafe_steps += bool(report.unwritten_reads)


@dataclass(slots=True)
class LLMEngine:
    """One rank's engine.

    Attributes:
        config: Its settings.
        runner: Runs the steps.
        stats: Counted so far.
        outputs: Tokens of the requests that are through.
    """

    config: EngineConfig
    runner: Runner
    stats: EngineStats = field(default_factory=EngineStats)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        manager = KVCacheManager(self.runner.kv_cache_config, self.config.cache_config.enable_prefix_caching)
        self.scheduler = Scheduler(self.config.scheduler_config, manager)

    def add_request(self, req_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Queue a request.

        Raises:
            ValueError: It is longer than the engine takes, empty, or under way already.
        """
        longest = self.config.scheduler_config.max_model_len
        if len(prompt_token_ids) + params.max_tokens > longest:
            raise ValueError(f"request {req_id} is longer than max_model_len, {longest} tokens")
        block_size = self.config.cache_config.block_size
        self.scheduler.add_request(Request(req_id, prompt_token_ids, params, block_size))

    def step(self) -> bool:
        """Run one step together with the other ranks; False: no rank had anything to run."""
        if not self.runner.ranks.any(self.scheduler.has_unfinished_requests):
            self.scheduler.kv_cache_manager.check_integrity()
            return False
        output = self.runner.execute_model(self.scheduler.schedule())
        self.stats.add(self.runner.last_step)
        for request in self.scheduler.update_from_output(output):
            self.outputs[request.req_id] = request.output_token_ids
        return True

    def run(self) -> dict[str, list[int]]:
        """Run until no rank has anything left; returns the output tokens of this rank's requests."""
        while self.step():
            pass
        return self.outputs

    def serve(
        self, requests: Sequence[WorkloadRequest], on_step: Callable[[int], None] | None = None
    ) -> dict[str, list[int]]:
        """Serve requests that arrive at their steps; an engine with nothing to run skips to the next arrival.

        Args:
            requests: This rank's, in order of arrival.
            on_step: Called after each step with the number of requests that are through.

        Returns:
            Their output tokens.
        """
        clock = 0
        coming = deque(requests)
        while True:
            while coming and coming[0].arrival_step <= clock:
                request = coming.popleft()
                self.add_request(request.req_id, request.prompt_token_ids, request.sampling_params)
            if self.step():
                clock += 1
            elif next_arrival := self.runner.ranks.min(coming[0].arrival_step if coming else None):
                clock = next_arrival
            else:
                return self.outputs
            if on_step is not None:
                on_step(len(self.outputs))


def load_model(
    config: EngineConfig, checkpoint: Path | None = None, ranks: Ranks | None = None
) -> DecoderModel:
    """The model of ``config.model_config``, with a checkpoint's weights or random ones."""
    dtype, device, ranks = getattr(torch, config.dtype), torch.device(config.device), ranks or Ranks()
    if checkpoint is None:
        return random_model(config.model_config, dtype, device, ranks, config.seed)
    return load_checkpoint(checkpoint, config.model_config, dtype, device, ranks)
