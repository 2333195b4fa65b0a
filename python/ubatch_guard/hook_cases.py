"""What the hooks cost a runner whose own methods do nothing: the ``hooks-*`` cases of the benchmark.

A case is some steps in a row, ready made, which a runner of vLLM's V1 or V2 shape walks through with the
hooks and without. Its decodes get a block every 16 steps, not all in the same one. What the guard puts off
until enough of it has come together falls into these steps as often as it does in the long run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ubatch_guard import reference
from ubatch_guard.runner.guard import RunnerGuard
from ubatch_guard.runner_mixin import UBatchGuardMixin, runner_guard
from ubatch_guard.settings import Settings
from ubatch_guard.step import KVCacheGroup, Policy, Step, feasible_cuts

BLOCK = 16
NUM_STEPS = 68
"""Four times the 17 steps that the guard lets come together: with the one before them, each is taken in."""
_CONTEXT = 4096
_DECODE_THRESHOLD = 1


@dataclass(frozen=True, slots=True)
class HookCase:
    """Steps of one batch size.

    Attributes:
        runner: ``v1`` or ``v2``.
        decodes: Requests that are there all the time, and run one token a step at about 4k.
        arriving: New requests in every step; each is gone in the next.
        hit: Tokens that each of them has computed: blocks that nobody else holds.
        tokens: All tokens of such a request; it runs the rest in one step.
    """

    runner: str
    decodes: int
    arriving: int = 0
    hit: int = 0
    tokens: int = 0

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"hooks-{self.runner}-{self.decodes}" + (f"-new{self.arriving}" if self.arriving else "")


HOOK_CASES = (
    HookCase("v1", 64),
    HookCase("v1", 256),
    HookCase("v1", 1024),
    HookCase("v1", 256, arriving=1, hit=7168, tokens=8192),
    HookCase("v1", 960, arriving=64, hit=131072 - 64, tokens=131072),
    HookCase("v2", 256),
    HookCase("v2", 1024),
    HookCase("v2", 256, arriving=1, hit=7168, tokens=8192),
    HookCase("v2", 960, arriving=64, hit=7168, tokens=8192),
)


@dataclass(slots=True)
class NewRequestData:
    """vLLM's, as far as it is read."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    prefill_token_ids: range


@dataclass(slots=True)
class CachedRequestData:
    """vLLM's, as far as it is read."""

    req_ids: list[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class SchedulerOutput:
    """vLLM's, as far as it is read."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    kv_connector_metadata: None = None
    total_num_scheduled_tokens: int = 0

    def __post_init__(self) -> None:
        self.total_num_scheduled_tokens = sum(self.num_scheduled_tokens.values())


class BatchReqState(NamedTuple):
    """What V2 gathers, as far as it is read."""

    req_ids: list[str]
    num_scheduled_tokens: npt.NDArray[np.int32]
    num_tokens: int
    idx_mapping_np: npt.NDArray[np.intp]
    is_prefilling_np: npt.NDArray[np.bool_]


@dataclass(slots=True)
class InputBatch:
    """V1's, as far as it is read, with the counts that its runner makes once the order is settled."""

    req_ids: list[str]
    num_computed_tokens_cpu: npt.NDArray[np.int32]
    num_scheduled_tokens: npt.NDArray[np.int32]

    def swap_states(self, i: int, j: int) -> None:
        """Two requests change places."""
        self.req_ids[i], self.req_ids[j] = self.req_ids[j], self.req_ids[i]
        for counts in (self.num_computed_tokens_cpu, self.num_scheduled_tokens):
            counts[[i, j]] = counts[[j, i]]


class ReadyStep:
    """One step, with all that a runner would make of it.

    Args:
        scheduler_output: The step.
        num_computed_tokens: int32, shape ``[num_reqs]``, in the order of the scheduler's counts, which is the
            batch's.
    """

    def __init__(self, scheduler_output: SchedulerOutput, num_computed_tokens: npt.NDArray[np.int32]) -> None:
        counts = scheduler_output.num_scheduled_tokens
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        self.scheduler_output = scheduler_output
        self.num_computed_tokens = num_computed_tokens
        self.num_scheduled_tokens = np.fromiter(counts.values(), np.int32, len(counts))
        self.input_batch = InputBatch(list(counts), num_computed_tokens, self.num_scheduled_tokens)
        self.gathered = (
            BatchReqState(
                list(counts),
                self.num_scheduled_tokens,
                sum(counts.values()),
                np.arange(len(counts)),
                np.fromiter((req_id in new for req_id in counts), np.bool_, len(counts)),
            ),
            None,
        )


class FullAttentionSpec(NamedTuple):
    """vLLM's, as far as it is read; the guard goes by the name."""

    block_size: int


class _Runner:
    """What runners of both shapes have."""

    def __init__(self, num_blocks: int) -> None:
        # The thresholds are vLLM's own.
        self.parallel_config = SimpleNamespace(
            use_ubatching=True,
            num_ubatches=2,
            dbo_decode_token_threshold=32,
            dbo_prefill_token_threshold=512,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_rank=0,
        )
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(BLOCK))
        self.kv_cache_config = SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[group])


class RunnerV1(_Runner):
    """The methods of V1 that are hooked; they do nothing but call each other."""

    reorder_batch_threshold = _DECODE_THRESHOLD
    uniform_decode_query_len = 1
    input_batch: InputBatch

    def run(self, step: ReadyStep) -> tuple[list[str], bool]:
        """One step; the order that it runs in, and the vote."""
        self.input_batch = step.input_batch
        self._update_states(step.scheduler_output)
        counts = step.num_scheduled_tokens
        decided = self._determine_batch_execution_and_padding(len(counts), counts)
        return step.input_batch.req_ids, decided[2]

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        self._may_reorder_batch(scheduler_output)

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        pass

    def _determine_batch_execution_and_padding(
        self, num_reqs: int, num_scheduled_tokens_np: npt.NDArray[np.int32]
    ) -> tuple[None, None, bool]:
        return None, None, self._allow_microbatching(num_reqs, num_scheduled_tokens_np)

    def _allow_microbatching(self, num_reqs: int, num_scheduled_tokens_np: npt.NDArray[np.int32]) -> bool:
        return True


class RunnerV2(_Runner):
    """The methods of V2 that are hooked; they do nothing but call each other."""

    decode_query_len = 1
    step: ReadyStep

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.req_states = SimpleNamespace(num_computed_tokens_np=None)
        self.ubatch_runner: object | None = object()

    def run(self, step: ReadyStep) -> tuple[list[str], bool]:
        """One step; the order that it runs in, and the vote."""
        self.step = step
        self.req_states.num_computed_tokens_np = step.num_computed_tokens
        return self.execute_model(step.scheduler_output)

    def execute_model(self, scheduler_output: SchedulerOutput) -> tuple[list[str], bool]:
        """Calls the other two."""
        self.finish_requests(scheduler_output)
        state, _ = self.gather_batch_req_state(scheduler_output, False)
        return state.req_ids, self.ubatch_runner is not None

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Does nothing."""

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, dummy_run: bool
    ) -> tuple[BatchReqState, None]:
        """The batch as it lies ready."""
        return self.step.gathered


class GuardedV1(UBatchGuardMixin, RunnerV1):
    """With the hooks."""

    ubatch_guard_settings = Settings(policy=Policy.REORDER, log_interval=0.0)
    ubatch_guard_cuts = staticmethod(feasible_cuts)


class GuardedV2(UBatchGuardMixin, RunnerV2):
    """With the hooks."""

    ubatch_guard_settings = Settings(policy=Policy.REORDER, log_interval=0.0)
    ubatch_guard_cuts = staticmethod(feasible_cuts)


BARE: Mapping[str, type[RunnerV1 | RunnerV2]] = {"v1": RunnerV1, "v2": RunnerV2}
GUARDED: Mapping[str, type[RunnerV1 | RunnerV2]] = {"v1": GuardedV1, "v2": GuardedV2}


class HookSubjects:
    """All that can be asked about one case, ready to be timed: calls without arguments.

    Attributes:
        case: The case.
        opening: Two steps in which its decodes come: whatever was there before is gone, and all is ready.
        steps: The steps that are timed.
        hazard: One more, after them, with a reader in front of the writer of the blocks that it hits.
        new_rows: Block ids of the requests that are new in a step.
    """

    def __init__(self, case: HookCase) -> None:
        self.case = case
        blocks = iter(range(1, 1 << 30))
        self._decodes = [f"decode-{place}" for place in range(case.decodes)]
        self._start = np.arange(case.decodes, dtype=np.int32) % BLOCK + _CONTEXT
        self._rows = [_take(blocks, -(-start // BLOCK)) for start in self._start.tolist()]
        self.new_rows = [_take(blocks, case.tokens // BLOCK) for _ in range(case.arriving)]
        came = [
            NewRequestData(req_id, (row,), start - 1, range(start))
            for req_id, row, start in zip(self._decodes, self._rows, self._start.tolist(), strict=True)
        ]
        before = [*self._decodes, *self._names(NUM_STEPS), "reader", "writer"]
        admitted = SchedulerOutput(
            came, CachedRequestData([], [], []), dict.fromkeys(self._decodes, 1), set(before)
        )
        self.opening = [ReadyStep(admitted, self._start - 1), self._step(self._start, blocks)]
        self.steps = [
            self._step(self._start + number, blocks, self._arriving(number), self._names(number - 1))
            for number in range(1, NUM_STEPS + 1)
        ]
        # Long enough for vLLM to cut the step, and hit up to behind the cuts that it can make.
        *hit, last = _take(blocks, 40)
        read = len(hit) * BLOCK
        reader = NewRequestData("reader", ([*hit, next(blocks)],), read, range(read + 8))
        writer = NewRequestData("writer", ([*hit, last],), 0, range(read + BLOCK))
        after = self._start + NUM_STEPS + 1
        self.hazard = self._step(after, blocks, [reader, writer], self._names(NUM_STEPS))
        self.num_blocks = next(blocks)
        self._bare = BARE[case.runner](self.num_blocks)
        self._guarded = GUARDED[case.runner](self.num_blocks)
        self._numpy_step = self._as_step() if case.runner == "v1" else None

    @property
    def guard(self) -> RunnerGuard:
        """The guard of the hooked runner."""
        guard = runner_guard(self._guarded)
        assert guard is not None
        return guard

    def open(self) -> None:
        """Make ready for `guarded`."""
        for step in self.opening:
            self._guarded.run(step)

    def guarded(self) -> None:
        """All steps with the hooks; after `open`."""
        run = self._guarded.run
        for step in self.steps:
            run(step)

    def bare(self) -> None:
        """All steps without them."""
        run = self._bare.run
        for step in self.steps:
            run(step)

    def yardstick(self) -> object:
        """What vLLM itself does about such a step: V1 its rule in numpy, V2 the sort of its batch.

        V2's key is that of ``v1/worker/gpu/model_runner.py``, ``sort_batch_req_ids``, in 0.34.
        """
        if self._numpy_step is not None:
            return reference.vllm_allows(self._numpy_step, _DECODE_THRESHOLD)
        scheduled = self.steps[0].scheduler_output
        counts, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        return sorted(counts, key=lambda r: (not drafts.get(r), (n := counts[r]) != 1, n))

    def floor(self) -> list[int]:
        """One look at each block id of the rows that are new in a step, as Python itself takes it."""
        return list(map(sum, self.new_rows))

    def check(self) -> None:
        """See that every step is allowed as it stands, and one with a hazard in another order; once.

        Raises:
            AssertionError: Not so.
        """
        self.open()
        for step in self.steps:
            order, allowed = self._guarded.run(step)
            if not allowed or order != list(step.scheduler_output.num_scheduled_tokens):
                raise AssertionError(f"{self.case.name}: a safe step is not allowed as it stands")
        counters = self.guard.counters
        if counters.steps != len(self.opening) + len(self.steps) or counters.eligible != counters.steps:
            raise AssertionError(f"{self.case.name}: a step is not counted as one that can be cut")
        if counters.reordered or counters.vetoed or counters.unasked:
            raise AssertionError(f"{self.case.name}: {counters.line()}")
        before = counters.reordered
        order, allowed = self._guarded.run(self.hazard)
        if not allowed or order[-2:] != ["writer", "reader"] or counters.reordered - before != 1:
            raise AssertionError(f"{self.case.name}: a reader in front of its writer is left there")

    def _names(self, number: int) -> list[str]:
        """The requests that are new in that step, of `NUM_STEPS` from 1 on."""
        return [f"new-{number}-{place}" for place in range(self.case.arriving)] if number else []

    def _arriving(self, number: int) -> list[NewRequestData]:
        case = self.case
        return [
            NewRequestData(req_id, (row,), case.hit, range(case.tokens))
            for req_id, row in zip(self._names(number), self.new_rows, strict=True)
        ]

    def _step(
        self,
        computed: npt.NDArray[np.int32],
        blocks: Iterator[int],
        arriving: Sequence[NewRequestData] = (),
        finished: Sequence[str] = (),
    ) -> ReadyStep:
        """The decodes, and behind them the new requests, which run all that they have not computed."""
        grown: list[tuple[list[int], ...] | None] = [
            ([next(blocks)],) if tokens % BLOCK == 0 else None for tokens in computed.tolist()
        ]
        counts = dict.fromkeys(self._decodes, 1)
        counts |= {
            request.req_id: len(request.prefill_token_ids) - request.num_computed_tokens
            for request in arriving
        }
        scheduled = SchedulerOutput(
            list(arriving), CachedRequestData(self._decodes, grown, computed.tolist()), counts, set(finished)
        )
        hits = np.array([request.num_computed_tokens for request in arriving], dtype=np.int32)
        return ReadyStep(scheduled, np.concatenate([computed, hits], dtype=np.int32))

    def _as_step(self) -> Step:
        """The first step as the numpy rule sees it."""
        first = self.steps[0]
        rows = [list(row) for row in self._rows]
        for step in (self.opening[-1], first):
            for row, new in zip(rows, step.scheduler_output.scheduled_cached_reqs.new_block_ids, strict=True):
                row += new[0] if new else []
        rows += self.new_rows
        table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
        for place, row in enumerate(rows):
            table[place, : len(row)] = row
        group = KVCacheGroup(BLOCK, self.num_blocks)
        return Step(first.num_computed_tokens, first.num_scheduled_tokens, (table,), (group,))


def _take(blocks: Iterator[int], count: int) -> list[int]:
    return [next(blocks) for _ in range(count)]


def hook_case(name: str) -> HookCase:
    """The case of that name."""
    return {case.name: case for case in HOOK_CASES}[name]
