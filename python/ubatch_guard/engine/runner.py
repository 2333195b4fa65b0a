"""One step on one rank: update the batch, order it, vote, cut, run, sample. vLLM's names, in vLLM's order.

``Runner`` lets every step be cut that is large enough: it is the runner without a guard. The methods that a
guard drops in for are `_update_states`, `_may_reorder_batch` and `_allow_microbatching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .config import EngineConfig
from .forward_context import ForwardContext, PagedKVCache
from .input_batch import CachedRequestState, InputBatch
from .kv_cache import KVCacheConfig, SlidingWindowSpec
from .metadata import build_attention_metadata, build_slot_mapping, query_spans
from .model import DecoderModel
from .outputs import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from .parallel import Ranks, coordinate_batch_across_dp
from .sampler import Sampler
from .sanitizer import Sanitizer, UnwrittenRead
from .streams import make_streams
from .ubatch import Overlap, UBatchSlice, maybe_create_ubatch_slices, run_ubatches


class BatchDescriptor(NamedTuple):
    """Size of a step once it is padded, in tokens and in requests."""

    num_tokens: int
    num_reqs: int


class BatchExecution(NamedTuple):
    """How a step is run, after the vote.

    Attributes:
        should_ubatch: It is cut.
        eligible: It would be cut if every rank allowed it.
    """

    batch_descriptor: BatchDescriptor
    should_ubatch: bool
    eligible: bool


@dataclass(frozen=True, slots=True)
class StepReport:
    """What became of the last step.

    Attributes:
        num_tokens: Scheduled tokens of this rank.
        num_tokens_padded: The same on every rank.
        eligible: The step was large enough to be cut.
        cuts: Where it was cut, in tokens; empty: it was run whole.
        unwritten_reads: What the sanitizer saw, if there is one.
    """

    num_tokens: int
    num_tokens_padded: int
    eligible: bool
    cuts: tuple[int, ...]
    unwritten_reads: tuple[UnwrittenRead, ...] = ()


class Runner:
    """Runs the steps that the scheduler decides on."""

    def __init__(self, config: EngineConfig, model: DecoderModel, ranks: Ranks | None = None) -> None:
        self.config = config
        self.model = model
        self.ranks = ranks or Ranks()
        self.device = model.device
        self.parallel_config = config.parallel_config
        self.reorder_batch_threshold = config.reorder_batch_threshold
        self.kv_cache_config = KVCacheConfig.of(config.model_config, config.cache_config)
        scheduler = config.scheduler_config
        self.input_batch = InputBatch(self.kv_cache_config, scheduler.max_num_seqs, scheduler.max_model_len)
        self.requests: dict[str, CachedRequestState] = {}
        self.last_step = StepReport(0, 0, False, ())
        self._split_point: Sequence[int] | None = None
        """Where to cut the step under way; None: into equal parts."""
        self._sampler = Sampler()
        self._streams = make_streams(self.device)
        self._kv_caches = self._allocate_kv_caches()
        self._group_of_layer = [0] * config.model_config.num_hidden_layers
        for group, spec in enumerate(self.kv_cache_config.kv_cache_groups):
            for name in spec.layer_names:
                self._group_of_layer[int(name)] = group
        self._sanitizer = None
        if config.sanitize:
            num_slots = len(self._kv_caches[0].keys)
            self._sanitizer = Sanitizer(
                len(self._kv_caches), num_slots, config.cache_config.block_size, self.device
            )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step and sample; a step without tokens only keeps the other ranks company."""
        self._update_states(scheduler_output)
        req_ids = list(self.input_batch.req_ids)
        num_scheduled_tokens = np.array(
            [scheduler_output.num_scheduled_tokens[req_id] for req_id in req_ids], dtype=np.int32
        )
        num_reqs = len(req_ids)
        execution = self._determine_batch_execution_and_padding(
            num_tokens=scheduler_output.total_num_scheduled_tokens,
            num_reqs=num_reqs,
            num_scheduled_tokens_np=num_scheduled_tokens,
            # An idle rank has no step to ask about; it is too small to be cut anyway.
            allow_microbatching=num_reqs == 0 or self._allow_microbatching(num_reqs, num_scheduled_tokens),
        )
        ubatch_slices, ubatch_slices_padded = maybe_create_ubatch_slices(
            execution.should_ubatch,
            num_scheduled_tokens,
            execution.batch_descriptor.num_tokens,
            execution.batch_descriptor.num_reqs,
            self.parallel_config.num_ubatches,
            self._split_point,
        )
        hidden = self._run_model(num_scheduled_tokens, ubatch_slices_padded, execution)
        sampled = self._sample(hidden, num_scheduled_tokens)
        self.last_step = StepReport(
            scheduler_output.total_num_scheduled_tokens,
            execution.batch_descriptor.num_tokens,
            execution.eligible,
            tuple(ubatch.token_slice.start for ubatch in (ubatch_slices or ())[1:]),
            tuple(self._sanitizer.end_step()) if self._sanitizer else (),
        )
        return ModelRunnerOutput(req_ids, sampled)

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Bring the persistent batch up to date, closed up and in order."""
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
            self._sampler.remove_request(req_id)
        # Requests that are not scheduled leave the batch, be it for one step, and keep their state.
        for req_id in list(self.input_batch.req_ids):
            if req_id not in scheduler_output.num_scheduled_tokens:
                self.input_batch.remove_request(req_id)

        arriving = []
        for new in scheduler_output.scheduled_new_reqs:
            self._sampler.add_request(new.req_id, new.sampling_params)
            block_ids = tuple(list(row) for row in new.block_ids)
            state = CachedRequestState(
                new.req_id, list(new.prompt_token_ids), block_ids, new.num_computed_tokens
            )
            self.requests[new.req_id] = state
            arriving.append(state)
        arriving += self._update_cached_requests(scheduler_output.scheduled_cached_reqs)
        for state in arriving:
            self.input_batch.add_request(state)
        self.input_batch.condense()
        self._may_reorder_batch(scheduler_output)

    def _update_cached_requests(self, cached: CachedRequestData) -> list[CachedRequestState]:
        """Update the requests that the runner knows; returns those that are not in the batch."""
        arriving = []
        for req_id, new_block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self.requests[req_id]
            state.num_computed_tokens = num_computed_tokens
            resumed = req_id in cached.resumed_req_ids
            if new_block_ids is not None:
                if resumed:
                    state.block_ids = tuple(list(row) for row in new_block_ids)
                else:
                    for row, new_row in zip(state.block_ids, new_block_ids, strict=True):
                        row.extend(new_row)
            index = self.input_batch.req_id_to_index.get(req_id)
            if index is None:
                arriving.append(state)
                continue
            self.input_batch.num_computed_tokens_cpu[index] = num_computed_tokens
            if new_block_ids is not None:
                table = self.input_batch.block_table
                (table.add_row if resumed else table.append_row)(new_block_ids, index)
        return arriving

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        """Order the batch decodes, extends, prefills, as attention backends with a threshold want it."""
        threshold = self.reorder_batch_threshold
        if threshold is None:
            return
        wanted = []
        for row, req_id in enumerate(self.input_batch.req_ids):
            num_tokens = scheduler_output.num_scheduled_tokens[req_id]
            if num_tokens <= threshold:
                phase = 0
            else:
                phase = 1 if self.input_batch.num_computed_tokens_cpu[row] > 0 else 2
            wanted.append((phase, row, req_id))
        for row, (_, _, req_id) in enumerate(sorted(wanted)):
            present = self.input_batch.req_id_to_index[req_id]
            if present != row:
                self.input_batch.swap_states(row, present)

    def _allow_microbatching(self, num_reqs: int, num_scheduled_tokens_np: npt.NDArray[np.int32]) -> bool:
        """Whether this rank's step may be cut; without a guard, always."""
        return True

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: npt.NDArray[np.int32],
        *,
        allow_microbatching: bool = True,
    ) -> BatchExecution:
        """Vote with the other ranks on whether the step is cut, and on its padding."""
        uniform_decode = num_reqs > 0 and bool((num_scheduled_tokens_np == 1).all())
        should_ubatch, eligible, num_tokens_padded = coordinate_batch_across_dp(
            self.ranks, self.parallel_config, num_tokens, allow_microbatching, uniform_decode
        )
        return BatchExecution(BatchDescriptor(num_tokens_padded, num_reqs), should_ubatch, eligible)

    def _run_model(
        self,
        num_scheduled_tokens: npt.NDArray[np.int32],
        ubatch_slices: list[UBatchSlice] | None,
        execution: BatchExecution,
    ) -> Tensor:
        """Hidden states of the step's tokens, ``[num_tokens_padded, hidden_size]``."""
        descriptor = execution.batch_descriptor
        whole = UBatchSlice(slice(0, descriptor.num_reqs), slice(0, descriptor.num_tokens))
        input_ids, positions = self._prepare_inputs(num_scheduled_tokens, descriptor.num_tokens)
        num_tokens = int(num_scheduled_tokens.sum())
        if self._sanitizer is not None:
            self._sanitizer.begin_step(self._slots_by_layer(num_scheduled_tokens, num_tokens))

        def forward(ubatch: UBatchSlice, overlap: Overlap) -> Tensor:
            context = self._prepare_context(ubatch, num_scheduled_tokens, num_tokens, overlap)
            tokens = ubatch.token_slice
            hidden: Tensor = self.model(input_ids[tokens], positions[tokens], context)
            return hidden

        if ubatch_slices is None:
            with self._streams.computing():
                return forward(whole, self._streams.overlap)
        outputs = run_ubatches(
            len(ubatch_slices), self._streams, lambda index, overlap: forward(ubatch_slices[index], overlap)
        )
        return torch.cat(outputs)

    def _prepare_inputs(
        self, num_scheduled_tokens: npt.NDArray[np.int32], num_tokens_padded: int
    ) -> tuple[Tensor, Tensor]:
        """Token ids and positions, int64 ``[num_tokens_padded]``; padding is token 0 at position 0."""
        input_ids = np.zeros(num_tokens_padded, dtype=np.int64)
        positions = np.zeros(num_tokens_padded, dtype=np.int64)
        offset = 0
        for row, req_id in enumerate(self.input_batch.req_ids):
            computed, length = (
                int(self.input_batch.num_computed_tokens_cpu[row]),
                int(num_scheduled_tokens[row]),
            )
            tokens = slice(offset, offset + length)
            input_ids[tokens] = self.requests[req_id].token_ids[computed : computed + length]
            positions[tokens] = np.arange(computed, computed + length)
            offset += length
        return torch.from_numpy(input_ids).to(self.device), torch.from_numpy(positions).to(self.device)

    def _prepare_context(
        self,
        ubatch: UBatchSlice,
        num_scheduled_tokens: npt.NDArray[np.int32],
        num_tokens: int,
        overlap: Overlap,
    ) -> ForwardContext:
        start, stop = ubatch.token_slice.start, min(ubatch.token_slice.stop, num_tokens)
        batch = self.input_batch
        spans = query_spans(batch.req_ids, batch.num_computed_tokens_cpu, num_scheduled_tokens, start, stop)
        by_group = []
        for group, table in zip(
            self.kv_cache_config.kv_cache_groups, batch.block_table.block_tables, strict=True
        ):
            spec = group.kv_cache_spec
            window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
            by_group.append(build_attention_metadata(spans, table, window, self.device))
        return ForwardContext(
            attention=[by_group[group] for group in self._group_of_layer],
            kv_caches=self._kv_caches,
            num_actual_tokens=stop - start,
            overlap=overlap,
            sanitizer=self._sanitizer,
        )

    def _slots_by_layer(self, num_scheduled_tokens: npt.NDArray[np.int32], num_tokens: int) -> list[Tensor]:
        """Per layer, the slots that the step is to write."""
        batch = self.input_batch
        spans = query_spans(batch.req_ids, batch.num_computed_tokens_cpu, num_scheduled_tokens, 0, num_tokens)
        by_group = [build_slot_mapping(spans, table, self.device) for table in batch.block_table.block_tables]
        return [by_group[group] for group in self._group_of_layer]

    def _sample(self, hidden: Tensor, num_scheduled_tokens: npt.NDArray[np.int32]) -> list[list[int]]:
        """A token for each request whose last known token was in the step; the runner remembers it."""
        batch = self.input_batch
        sampling: list[str] = []
        last_tokens: list[int] = []
        ends = np.cumsum(num_scheduled_tokens)
        for row, req_id in enumerate(batch.req_ids):
            known = len(self.requests[req_id].token_ids)
            if int(batch.num_computed_tokens_cpu[row]) + int(num_scheduled_tokens[row]) == known:
                sampling.append(req_id)
                last_tokens.append(int(ends[row]) - 1)
        sampled: dict[str, list[int]] = {}
        if sampling:
            with torch.inference_mode():
                logits = self.model.compute_logits(hidden[torch.tensor(last_tokens, device=self.device)])
            for req_id, token_id in zip(sampling, self._sampler.sample(logits, sampling), strict=True):
                self.requests[req_id].token_ids.append(token_id)
                sampled[req_id] = [token_id]
        return [sampled.get(req_id, []) for req_id in batch.req_ids]

    def _allocate_kv_caches(self) -> list[PagedKVCache]:
        config, cache = self.config.model_config, self.config.cache_config
        return [
            PagedKVCache(
                layer,
                cache.num_blocks * cache.block_size,
                config.num_key_value_heads,
                config.head_dim,
                getattr(torch, self.config.dtype),
                self.device,
            )
            for layer in range(config.num_hidden_layers)
        ]
