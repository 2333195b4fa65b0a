"""Runners of vLLM's V1 and V2 shape without torch, and a scheduler with prefix caching that feeds them.

They do what the hooks see of the real ones: rows, counts and batch order, by vLLM's names and ways. What a
step computes is left out. `Scheduler.as_step` gives the same step from the scheduler's own books, which an
oracle can judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ubatch_guard.hook_cases import (
    BatchReqState,
    CachedRequestData,
    FullAttentionSpec,
    NewRequestData,
    SchedulerOutput,
)
from ubatch_guard.runner_mixin import UBatchGuardMixin
from ubatch_guard.settings import Settings
from ubatch_guard.step import KVCacheGroup, Policy, Step

MAX_REQS = 64


@dataclass(slots=True)
class Request:
    """A live request, as the scheduler knows it.

    Attributes:
        num_prefill_tokens: Of its prompt and, after a preemption, of what it had generated.
        end: Tokens at which it is through.
        rows: Block ids, one row per KV cache group.
        num_computed_tokens: Before the step under way.
        num_scheduled_tokens: In it.
    """

    name: Any
    num_prefill_tokens: int
    end: float
    rows: list[list[int]] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0


class Arrival(NamedTuple):
    """A request that waits, with the live one whose blocks it may hit, and the most tokens of them."""

    request: Request
    donor: Any
    most: int


class Pool:
    """The blocks of a KV cache group, with a count of holders; block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks - 1, 0, -1))
        self.holders = [0] * num_blocks

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(count)]
        self.hold(taken)
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.holders[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1
            if block and not self.holders[block]:
                self.free.append(block)


class Scheduler:
    """Hands out blocks and tokens as vLLM's scheduler does: running requests first, then those that wait.

    A request is published when it is scheduled, so one that is admitted behind it may hit what it computes in
    the same step.

    Args:
        groups: KV cache groups.
        chunk: Most tokens of a request in a step.
        resumed_are_new: A preempted request comes again in ``scheduled_new_reqs``, as in vLLM 0.34; otherwise
            among the running ones with ``resumed_req_ids``.
    """

    def __init__(self, groups: Sequence[KVCacheGroup], chunk: int, resumed_are_new: bool) -> None:
        self.groups = tuple(groups)
        self.pools = [Pool(group.num_blocks) for group in groups]
        self.running: dict[Any, Request] = {}
        self._chunk = chunk
        self._resumed_are_new = resumed_are_new
        self._hit_unit = math.lcm(*(group.tokens_per_column for group in groups))
        self._waiting: list[Arrival] = []
        self._finished: set[Any] = set()
        self._preempted: set[Any] = set()

    def arrive(
        self, name: Any, num_tokens: int, donor: Any = None, most: int = 0, end: float = math.inf
    ) -> None:
        """A request that begins like ``donor`` for ``most`` tokens; it is admitted in the next step."""
        self._waiting.append(Arrival(Request(name, num_tokens, end), donor, most))

    def finish(self, name: Any) -> None:
        """A running request is through."""
        self._release(self.running.pop(name))
        self._finished.add(name)

    def preempt(self, name: Any) -> None:
        """A running request loses its blocks, and waits."""
        request = self.running.pop(name)
        self._release(request)
        self._preempted.add(name)
        tokens = request.num_computed_tokens + request.num_scheduled_tokens
        again = Request(name, max(request.num_prefill_tokens, tokens), request.end)
        self._waiting.append(Arrival(again, None, 0))

    def room(self) -> int:
        """Free blocks of the fullest pool."""
        return min(len(pool.free) for pool in self.pools)

    def step(self) -> SchedulerOutput:
        """The next step: all running requests, and all that wait."""
        counts: dict[Any, int] = {}
        cached = CachedRequestData([], [], [])
        for name, request in self.running.items():
            request.num_computed_tokens += request.num_scheduled_tokens
            left = request.num_prefill_tokens - request.num_computed_tokens
            request.num_scheduled_tokens = counts[name] = min(left, self._chunk) if left > 0 else 1
            cached.req_ids.append(name)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            grown = self._grow(request)
            cached.new_block_ids.append(grown if any(grown) else None)
        new: list[NewRequestData] = []
        for request, donor, most in self._waiting:
            self._hit(request, donor, most)
            request.num_scheduled_tokens = counts[request.name] = min(
                request.num_prefill_tokens - request.num_computed_tokens, self._chunk
            )
            self._grow(request)
            self.running[request.name] = request
            rows = tuple(list(row) for row in request.rows)
            if request.name in self._before and not self._resumed_are_new:
                cached.resumed_req_ids.add(request.name)
                cached.req_ids.append(request.name)
                cached.num_computed_tokens.append(request.num_computed_tokens)
                cached.new_block_ids.append(rows)
            else:
                prompt = range(request.num_prefill_tokens)
                new.append(NewRequestData(request.name, rows, request.num_computed_tokens, prompt))
        self._waiting = []
        output = SchedulerOutput(new, cached, counts, self._finished, self._preempted)
        self._before = self._before - self._finished | self._preempted
        self._finished, self._preempted = set(), set()
        return output

    _before: frozenset[Any] = frozenset()
    """Those that were preempted."""

    def as_step(self, order: Sequence[Any]) -> Step:
        """The step under way in a batch order."""
        requests = [self.running[name] for name in order]
        tables = []
        for place in range(len(self.groups)):
            table = np.zeros((len(requests), max(len(request.rows[place]) for request in requests)), np.int32)
            for row, request in zip(table, requests, strict=True):
                row[: len(request.rows[place])] = request.rows[place]
            tables.append(table)
        return Step(
            np.array([request.num_computed_tokens for request in requests], dtype=np.int32),
            np.array([request.num_scheduled_tokens for request in requests], dtype=np.int32),
            tuple(tables),
            self.groups,
        )

    def _hit(self, request: Request, donor: Any, most: int) -> None:
        """Give a request the leading blocks of one that was scheduled before it."""
        request.rows = [[] for _ in self.groups]
        holder = self.running.get(donor)
        if holder is None:
            return
        published = holder.num_computed_tokens + holder.num_scheduled_tokens
        tokens = min(most, published, request.num_prefill_tokens - 1) // self._hit_unit * self._hit_unit
        rows = []
        for group, held in zip(self.groups, holder.rows, strict=True):
            first = _first_read(group, tokens) // group.tokens_per_column
            needed = held[first : tokens // group.tokens_per_column]
            if 0 in needed:
                # They left the donor's window before it came itself.
                return
            rows.append([0] * first + needed)
        for pool, row in zip(self.pools, rows, strict=True):
            pool.hold(row)
        request.rows, request.num_computed_tokens = rows, tokens

    def _grow(self, request: Request) -> tuple[list[int], ...]:
        tokens = request.num_computed_tokens + request.num_scheduled_tokens
        grown = []
        for group, pool, row in zip(self.groups, self.pools, request.rows, strict=True):
            grown.append(pool.take(max(0, -(-tokens // group.tokens_per_column) - len(row))))
            row += grown[-1]
        return tuple(grown)

    def _release(self, request: Request) -> None:
        for pool, row in zip(self.pools, request.rows, strict=True):
            pool.drop(row)


def _first_read(group: KVCacheGroup, num_computed_tokens: int) -> int:
    if group.sliding_window is not None:
        return max(0, num_computed_tokens - group.sliding_window + 1)
    if group.attention_chunk_size is not None:
        return num_computed_tokens // group.attention_chunk_size * group.attention_chunk_size
    return 0


class SlidingWindowSpec(NamedTuple):
    """vLLM's, as far as it is read; the guard goes by the name."""

    block_size: int
    sliding_window: int


class ChunkedLocalAttentionSpec(NamedTuple):
    """vLLM's, as far as it is read; the guard goes by the name."""

    block_size: int
    attention_chunk_size: int


def spec_of(group: KVCacheGroup) -> Any:
    """The ``kv_cache_spec`` of a group."""
    if group.sliding_window is not None:
        return SlidingWindowSpec(group.tokens_per_column, group.sliding_window)
    if group.attention_chunk_size is not None:
        return ChunkedLocalAttentionSpec(group.tokens_per_column, group.attention_chunk_size)
    return FullAttentionSpec(group.tokens_per_column)


class Ran(NamedTuple):
    """What became of a step.

    Attributes:
        own_order: The batch as the runner alone would run it.
        order: The batch as it ran.
        allowed: It was voted that the step may be cut.
    """

    own_order: list[Any]
    order: list[Any]
    allowed: bool


@dataclass(slots=True)
class CachedRequestState:
    """What a runner knows of a request."""

    block_ids: list[list[int]]
    num_computed_tokens: int
    num_prefill_tokens: int


class _Runner:
    """What runners of both shapes have: the requests as the scheduler outputs tell them."""

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        self.parallel_config = SimpleNamespace(use_ubatching=True, num_ubatches=2, data_parallel_rank=0)
        self.kv_cache_config = SimpleNamespace(
            num_blocks=max(group.num_blocks for group in groups),
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec_of(group)) for group in groups],
        )
        self.groups = tuple(groups)
        self.requests: dict[Any, CachedRequestState] = {}
        self.own_order: list[Any] = []

    def _drop(self, scheduler_output: SchedulerOutput) -> list[Any]:
        """Forget who is through; the others that are not in the batch any more."""
        for name in scheduler_output.finished_req_ids:
            self.requests.pop(name, None)
        preempted = scheduler_output.preempted_req_ids or ()
        return [*scheduler_output.finished_req_ids, *preempted]

    def _take_over(self, scheduler_output: SchedulerOutput) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            rows = [list(row) for row in new.block_ids]
            self.requests[new.req_id] = CachedRequestState(
                rows, new.num_computed_tokens, len(new.prefill_token_ids)
            )
        cached = scheduler_output.scheduled_cached_reqs
        for name, computed, grown in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request = self.requests[name]
            request.num_computed_tokens = computed
            if name in cached.resumed_req_ids:
                request.block_ids = [list(row) for row in grown or ()]
            elif grown is not None:
                for row, more in zip(request.block_ids, grown, strict=True):
                    row += more

    def _table(self, names: Sequence[Any], place: int) -> np.ndarray:
        rows = [self.requests[name].block_ids[place] for name in names]
        table = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
        for into, row in zip(table, rows, strict=True):
            into[: len(row)] = row
        return table


class InputBatch:
    """V1's batch: requests keep their places, and new ones fill the holes."""

    def __init__(self, runner: ShapeV1) -> None:
        self.req_ids: list[Any] = []
        self.num_computed_tokens_cpu = np.zeros(MAX_REQS, np.int32)
        tables = [BlockTable(runner, place) for place in range(len(runner.groups))]
        self.block_table = SimpleNamespace(block_tables=tables)

    def swap_states(self, i: int, j: int) -> None:
        self.req_ids[i], self.req_ids[j] = self.req_ids[j], self.req_ids[i]
        computed = self.num_computed_tokens_cpu
        computed[i], computed[j] = computed[j], computed[i]


class BlockTable:
    """V1's block table of a group, made from the runner's requests when somebody looks."""

    def __init__(self, runner: ShapeV1, place: int) -> None:
        self._runner = runner
        self._place = place

    def get_numpy_array(self) -> np.ndarray:
        return self._runner._table(self._runner.input_batch.req_ids, self._place)

    @property
    def num_blocks_per_row(self) -> np.ndarray:
        requests = self._runner.requests
        rows = [requests[name].block_ids[self._place] for name in self._runner.input_batch.req_ids]
        return np.array([len(row) for row in rows], dtype=np.int32)


class ShapeV1(_Runner):
    """A runner of V1's shape."""

    reorder_batch_threshold = 1
    uniform_decode_query_len = 1

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        super().__init__(groups)
        self.input_batch = InputBatch(self)
        self.asked = 0
        self.verdict: Callable[[], bool] = lambda: True
        """The engine's own."""

    def run(self, scheduler_output: SchedulerOutput) -> Ran:
        self._update_states(scheduler_output)
        order = self.input_batch.req_ids
        counts = np.array([scheduler_output.num_scheduled_tokens[name] for name in order], dtype=np.int32)
        decided = self._determine_batch_execution_and_padding(len(order), counts)
        return Ran(self.own_order, list(order), decided[2])

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        gone = set(self._drop(scheduler_output))
        self._take_over(scheduler_output)
        batch, counts = self.input_batch, scheduler_output.num_scheduled_tokens
        old: list[Any] = [name if name in counts and name not in gone else None for name in batch.req_ids]
        there = set(old)
        coming = iter([name for name in counts if name not in there])
        order = [next(coming, None) if name is None else name for name in old] + list(coming)
        while None in order:
            # Condensed: the last one goes into the first hole.
            last = order.pop()
            if last is not None:
                order[order.index(None)] = last
        batch.req_ids[:] = order
        for place, name in enumerate(order):
            batch.num_computed_tokens_cpu[place] = self.requests[name].num_computed_tokens
        self._may_reorder_batch(scheduler_output)

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        """Decodes to the front."""
        batch, counts = self.input_batch, scheduler_output.num_scheduled_tokens
        front = 0
        for place, name in enumerate(list(batch.req_ids)):
            if counts[name] <= self.reorder_batch_threshold:
                if place != front:
                    batch.swap_states(place, front)
                front += 1
        self.own_order = list(batch.req_ids)

    def _determine_batch_execution_and_padding(
        self, num_reqs: int, num_scheduled_tokens_np: np.ndarray
    ) -> tuple[None, Any, bool]:
        total = SimpleNamespace(num_tokens=int(num_scheduled_tokens_np.sum()))
        return None, total, self._allow_microbatching(num_reqs, num_scheduled_tokens_np)

    def _allow_microbatching(self, num_reqs: int, num_scheduled_tokens_np: np.ndarray) -> bool:
        self.asked += 1
        return self.verdict()


@dataclass(slots=True)
class OnDevice:
    """An array that has to be fetched."""

    values: np.ndarray

    def cpu(self) -> OnDevice:
        return self

    def numpy(self) -> np.ndarray:
        return self.values

    def __getitem__(self, index: Any) -> OnDevice:
        return OnDevice(self.values[index])


class UBatchRunner:
    """V2's, as far as it is hooked: where a step that is cut is cut."""

    def prepare(self, batch: Any, block_tables: Any, slot_mappings: Any) -> SimpleNamespace:
        tokens = int(batch.query_start_loc_np[-1])
        bounds = [(0, tokens // 2), (tokens // 2, tokens)]
        return SimpleNamespace(slices=[SimpleNamespace(token_slice=slice(*bound)) for bound in bounds])


class BlockTables:
    """V2's block tables, made from the runner's requests when somebody looks."""

    def __init__(self, runner: ShapeV2) -> None:
        self._runner = runner
        self.block_sizes = [group.tokens_per_column for group in runner.groups]

    @property
    def num_blocks(self) -> SimpleNamespace:
        places = range(len(self._runner.groups))
        rows = [self._runner.requests[name].block_ids for name in self._runner.by_index()]
        return SimpleNamespace(np=np.array([[len(row[place]) for row in rows] for place in places], np.int32))

    @property
    def block_tables(self) -> list[SimpleNamespace]:
        names = self._runner.by_index()
        tables = [self._runner._table(names, place) for place in range(len(self._runner.groups))]
        return [SimpleNamespace(gpu=OnDevice(table)) for table in tables]


class ShapeV2(_Runner):
    """A runner of V2's shape."""

    decode_query_len = 1

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        super().__init__(groups)
        self.ubatch_runner: UBatchRunner | None = UBatchRunner()
        self.block_tables = BlockTables(self)
        self.req_states = SimpleNamespace(num_computed_tokens_np=np.zeros(MAX_REQS, np.int32))
        self.req_states.req_id_to_index = {}

    def by_index(self) -> list[Any]:
        """Requests by their place in the tables; an empty place is a copy of another."""
        indices = self.req_states.req_id_to_index
        names = [next(iter(indices), None)] * (max(indices.values(), default=-1) + 1)
        for name, index in indices.items():
            names[index] = name
        return names

    def run(self, scheduler_output: SchedulerOutput) -> Ran:
        return self.execute_model(scheduler_output)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Ran:
        self.finish_requests(scheduler_output)
        self._update_requests(scheduler_output)
        state, _ = self.gather_batch_req_state(scheduler_output, False)
        allowed = self.ubatch_runner is not None
        if self.ubatch_runner is not None and state.num_tokens > 1:
            self._prepare(self.ubatch_runner, state)
        return Ran(self.own_order, list(state.req_ids), allowed)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        for name in self._drop(scheduler_output):
            self.req_states.req_id_to_index.pop(name, None)

    def _update_requests(self, scheduler_output: SchedulerOutput) -> None:
        self._take_over(scheduler_output)
        states = self.req_states
        taken = set(states.req_id_to_index.values())
        free: Iterator[int] = (index for index in range(MAX_REQS) if index not in taken)
        for name in scheduler_output.num_scheduled_tokens:
            if name not in states.req_id_to_index:
                states.req_id_to_index[name] = next(free)
            index = states.req_id_to_index[name]
            states.num_computed_tokens_np[index] = self.requests[name].num_computed_tokens

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, dummy_run: bool
    ) -> tuple[BatchReqState, None]:
        """The batch, shorter queries first (``v1/worker/gpu/model_runner.py``, ``sort_batch_req_ids``)."""
        counts = scheduler_output.num_scheduled_tokens
        names = sorted(counts, key=lambda name: (counts[name] != 1, counts[name]))
        self.own_order = list(names)
        requests = [self.requests[name] for name in names]
        return (
            BatchReqState(
                names,
                np.array([counts[name] for name in names], dtype=np.int32),
                sum(counts.values()),
                np.array([self.req_states.req_id_to_index[name] for name in names], dtype=np.intp),
                np.array([r.num_computed_tokens < r.num_prefill_tokens for r in requests], dtype=np.bool_),
            ),
            None,
        )

    def _prepare(self, ubatch_runner: UBatchRunner, state: BatchReqState) -> None:
        """Hand the step over as it is to be cut, with its block tables and slot mappings."""
        counts = state.num_scheduled_tokens
        computed = self.req_states.num_computed_tokens_np[state.idx_mapping_np]
        row = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(counts)
        position = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + computed[row]
        tables, slots = [], []
        for place, group in enumerate(self.groups):
            table, span = self._table(state.req_ids, place), group.tokens_per_column
            tables.append(OnDevice(table))
            slots.append(OnDevice(table[row, position // span] * span + position % span))
        batch = SimpleNamespace(
            num_reqs=len(counts),
            req_ids=state.req_ids,
            query_start_loc_np=np.concatenate([[0], ends]),
            seq_lens=OnDevice(computed + counts),
        )
        ubatch_runner.prepare(batch, tables, slots)


class GuardedV1(UBatchGuardMixin, ShapeV1):
    """With the hooks."""

    ubatch_guard_settings = Settings(policy=Policy.REORDER, log_interval=0.0)


class GuardedV2(UBatchGuardMixin, ShapeV2):
    """With the hooks."""

    ubatch_guard_settings = Settings(policy=Policy.REORDER, log_interval=0.0)


GUARDED: dict[str, type[GuardedV1 | GuardedV2]] = {"v1": GuardedV1, "v2": GuardedV2}


def guarded(shape: str, settings: Settings, groups: Sequence[KVCacheGroup]) -> GuardedV1 | GuardedV2:
    """A guarded runner of a shape, ``v1`` or ``v2``."""
    runner = GUARDED[shape](groups)
    runner.ubatch_guard_settings = settings
    return runner
