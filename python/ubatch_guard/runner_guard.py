"""The guard of one model runner: learns of blocks, plans an order, votes. Knows no runner, only its step."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ubatch_guard._core import Mirror
from ubatch_guard.counters import Counters, Labels, default_export
from ubatch_guard.kv_cache_groups import EngineGroups
from ubatch_guard.order_constraint import decode_phases
from ubatch_guard.settings import Settings
from ubatch_guard.step import IntArray, Order, OrderConstraint, Policy, Reason
from ubatch_guard.trace.format import TraceHeader
from ubatch_guard.trace.recorder import StepRecorder

# Below "vllm", so that inside vLLM its handlers and format apply.
logger = logging.getLogger("vllm.ubatch_guard")

_EXPORT_NS = 1_000_000_000

Rows = Sequence[Sequence[int]]
"""Block ids per engine KV cache group, as vLLM's ``block_ids`` has them."""


@dataclass(slots=True)
class Batch:
    """A step as the runner is about to run it, in batch order.

    Attributes:
        req_ids: The requests.
        num_computed_tokens: int32 or int64, shape ``[num_reqs]``.
        num_scheduled_tokens: int32 or int64, shape ``[num_reqs]``.
        num_tokens: Their sum.
        num_ubatches: Microbatches of a split step.
        decode_threshold: Longest query that the engine counts as a decode.
        order_constraint: Asked only when the step has an unsafe cut.
        eligible: The engine's own token thresholds let it cut this step.
        any_cut: The step's token offsets are not those of the cut (they change after the vote), so every
            cut of the step has to be safe, which depends on the order alone.
    """

    req_ids: Sequence[str]
    num_computed_tokens: IntArray
    num_scheduled_tokens: IntArray
    num_tokens: int
    num_ubatches: int
    decode_threshold: int
    order_constraint: Callable[[], OrderConstraint]
    eligible: bool
    any_cut: bool = False


@dataclass(slots=True)
class _StepState:
    """What is known of the step under way."""

    new: set[str] = field(default_factory=set)
    """Requests that are new or resumed in it."""
    set_back: set[str] = field(default_factory=set)
    """Running requests that a failed KV load keeps from getting on: they may read what another recomputes."""
    unsafe: set[str] = field(default_factory=set)
    """Kinds of readers that an unsafe cut was found for, before any reordering."""
    veto: Reason = Reason.UNSAFE
    """Why it is vetoed, should it be unsafe."""
    voted: bool = False


@dataclass(slots=True)
class _Deltas:
    """Rows that went, came and grew since the last step in the trace."""

    finished: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    new: list[tuple[str, int, list[list[int]]]] = field(default_factory=list)
    resumed: list[tuple[str, int, list[list[int]]]] = field(default_factory=list)
    appended: list[tuple[str, list[list[int]]]] = field(default_factory=list)


class _Guarded:
    """The context manager of `RunnerGuard.guarded`; several a step, so without a generator's cost."""

    __slots__ = ("_guard", "_what")

    def __init__(self, guard: RunnerGuard, what: str) -> None:
        self._guard = guard
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            return False
        # A panic of the core is no Exception.
        message = f"{self._what} ({type(error).__name__}: {error}); voting no"
        self._guard.lose(_reason_of(error), message)
        return True


class RunnerGuard:
    """Mirror, verdicts and counts of one model runner.

    Every method is called from the thread that runs the steps. None raises: what goes wrong is counted,
    logged once, and makes the guard vote "no" on the step, since an exception on one data-parallel rank
    hangs the others.

    Args:
        groups: The engine's KV cache groups, or why they are not understood; then every step is voted "no"
            on.
        settings: ``settings.policy`` must not be None.
        engine_rows: Yields ``(request id, block ids per engine group)`` of all live requests as the engine
            itself has them, to start again from when the mirror is found to be wrong; None: there is no
            such source.
        name: Of the worker, for the trace's file name.
    """

    def __init__(
        self,
        groups: EngineGroups | Exception,
        settings: Settings,
        engine_rows: Callable[[], Iterable[tuple[str, Rows]]] | None = None,
        name: str = "0",
    ) -> None:
        if settings.policy is None:
            raise ValueError("a guard that is off has no RunnerGuard")
        self.policy = settings.policy
        self.settings = settings
        self.counters = Counters()
        self.groups = groups if isinstance(groups, EngineGroups) else EngineGroups((), ())
        self.mirror = Mirror(self.groups.groups)
        self.recorder: StepRecorder | None = None
        self._engine_rows = engine_rows
        self._name = name
        self._tracing = settings.trace is not None
        self._lost: str | None = None
        """Why the mirror cannot be relied on; None: it can."""
        self._not_understood: str | None = None
        self._step = _StepState()
        self._slots_of: list[str] = []
        self._slots = self.mirror.slots([])
        """Handles of ``_slots_of``: most steps have the requests of the step before."""
        self._observed: object = None
        self._num_computed_tokens: dict[str, int] = {}
        """Where the requests stood when they were last scheduled, in an engine that loads KV."""
        self._deltas = _Deltas()
        self._logged: set[str] = set()
        self._asking_engine = False
        self._exported: dict[tuple[str, Labels], float] = {}
        self._next_export = 0
        self._next_log = time.monotonic_ns() + int(settings.log_interval * 1e9)
        if not isinstance(groups, EngineGroups):
            self._not_understood = "unknown_group"
            self._log_once(self._not_understood, f"{groups}: every step will run whole")

    def observe(self, scheduler_output: Any) -> None:
        """Take in what the scheduler changed, before the runner does; once per ``scheduler_output``."""
        if scheduler_output is self._observed:
            return
        self._observed = scheduler_output
        self._step = _StepState()
        with self.guarded("the scheduler's changes could not be followed"):
            self._apply(scheduler_output)

    def plan(self, batch: Batch) -> Order | None:
        """The order to run ``batch`` in; None: leave it. Votes on nothing."""
        if not self.may_plan or len(batch.req_ids) < 2:
            return None
        started = time.perf_counter_ns()
        order = None
        with self.guarded("no order could be planned"):
            order = self._plan(batch)
        self._timed(started)
        return order

    def vote(self, batch: Batch, ask_engine: Callable[[], bool]) -> bool:
        """Whether ``batch``, as it stands, may be cut.

        Args:
            batch: The step in its final order.
            ask_engine: The engine's own verdict. It can be slow, so it is asked only when it decides
                (observing), for the trace, and at every verification.
        """
        if self._asking_engine:
            # The engine's verdict goes through this very guard again, where both subclass and plugin guard
            # it.
            return ask_engine()
        verify = self.settings.verify_every > 0 and self.counters.steps % self.settings.verify_every == 0
        theirs = None
        if self.policy is Policy.OBSERVE or self._tracing or verify:
            self._asking_engine = True
            try:
                theirs = ask_engine()
            finally:
                self._asking_engine = False

        started = time.perf_counter_ns()
        safe = False
        reason = self._doubt()
        if reason is None:
            with self.guarded("the step could not be checked"):
                safe = self._is_safe(batch)
            reason = self._doubt() or self._step.veto.value
        self._timed(started)
        if self._lost:
            self._start_again()

        if not self._step.voted:
            self._step.voted = True
            self._count(batch, safe, reason, theirs)
        if theirs is not None and self._tracing:
            self._record(batch, theirs)
        self._report()
        return theirs if self.policy is Policy.OBSERVE and theirs is not None else safe

    def watch(self, batch: Batch, ask_engine: Callable[[], bool]) -> bool:
        """Leave a step of an engine that does not microbatch to its own verdict; at most record it."""
        if self._asking_engine:
            return ask_engine()
        theirs = ask_engine()
        if self._tracing and not self._step.voted:
            self._record(batch, theirs)
        self._step.voted = True
        if self._lost:
            self._start_again()
        return theirs

    def vote_undecided(self) -> bool:
        """Vote "no" on a step that could not even be read."""
        self._step.voted = True
        self.counters.steps += 1
        self.counters.vetoed[self._doubt() or Reason.UNDECIDED.value] += 1
        if self._lost:
            self._start_again()
        return False

    @property
    def may_plan(self) -> bool:
        """An order is worth planning in the step under way.

        A request reads what another writes in the same step only when it is new or resumed in it, or when a
        failed KV load has set it back. So most steps of a decoding engine need no plan.
        """
        may_read = self._step.new or self._step.set_back
        return bool(may_read) and self.policy is Policy.REORDER and self._doubt() is None

    @property
    def step_open(self) -> bool:
        """A step was scheduled and not voted on yet."""
        return self._observed is not None and not self._step.voted

    @property
    def step_voted(self) -> bool:
        """The step under way has been voted on."""
        return self._step.voted

    def compare(
        self, req_ids: Sequence[str], group: int, block_table: IntArray, num_blocks_per_row: IntArray
    ) -> None:
        """Count a difference between the mirror and the engine's own block table of ``groups[group]``.

        Args:
            req_ids: The batch.
            group: Place in ``groups``.
            block_table: int32 or int64, shape ``[len(req_ids), columns]``.
            num_blocks_per_row: int32 or int64, shape ``[len(req_ids)]``.
        """
        found = self.mirror.first_difference(
            self._slots_in_order(req_ids), group, block_table, num_blocks_per_row
        )
        if found is not None:
            row, column = found
            self.counters.mirror_differences += 1
            where = f"{req_ids[row]!r}, group {group}, column {column}"
            self.lose("mirror_difference", f"the block table is not what was scheduled: {where}")

    def lose(self, why: str, message: str) -> None:
        """Doubt the mirror: vote "no" until it is made anew from the engine's rows."""
        self._lost = why
        self._log_once(why, message)
        # A trace with a hole could not be replayed.
        self._tracing = False
        if self.recorder is not None:
            self.recorder.close(timeout=0.0)

    def verify_due(self) -> bool:
        """Whether this is a step whose mirror is to be compared with the runner's own block table."""
        every = self.settings.verify_every
        return every > 0 and self.counters.steps % every == 0 and self._doubt() is None

    def guarded(self, what: str) -> _Guarded:
        """Log what the block raises, and doubt the mirror until it is made anew."""
        return _Guarded(self, what)

    # What follows may raise; the methods above catch it.

    def _apply(self, scheduler_output: Any) -> None:
        mirror, rows_of = self.mirror, self.groups.rows
        cached = scheduler_output.scheduled_cached_reqs
        # A request can finish that was never scheduled, or whose row went when it was preempted.
        finished = [req_id for req_id in scheduler_output.finished_req_ids if req_id in mirror]
        preempted = [
            req_id
            for req_id in getattr(scheduler_output, "preempted_req_ids", None) or ()
            if req_id in mirror and req_id not in scheduler_output.finished_req_ids
        ]
        if finished or preempted:
            # They may come again, in other slots.
            self._slots_of = []
        for req_id in (*finished, *preempted):
            mirror.free(req_id)
        for request in scheduler_output.scheduled_new_reqs:
            self._step.new.add(request.req_id)
            # A streaming request comes as new again and again.
            put = mirror.replace if request.req_id in mirror else mirror.add
            put(request.req_id, rows_of(request.block_ids))
        resumed = cached.resumed_req_ids
        if self._tracing:
            self._note_deltas(scheduler_output, finished, preempted)
        if resumed:
            self._step.new |= resumed
            for req_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if req_id in resumed:
                    put = mirror.replace if req_id in mirror else mirror.add
                    put(req_id, rows_of(new_block_ids))
                elif new_block_ids is not None:
                    mirror.append(req_id, rows_of(new_block_ids))
        else:
            block_ids = cached.new_block_ids
            if not self.groups.are_all:
                block_ids = [None if rows is None else rows_of(rows) for rows in block_ids]
            mirror.append_each(cached.req_ids, block_ids)
        # Only an engine with a KV connector has loads that fail.
        if getattr(scheduler_output, "kv_connector_metadata", None) is not None:
            self._find_set_back(scheduler_output, (*finished, *preempted))

    def _find_set_back(self, scheduler_output: Any, gone: Iterable[str]) -> None:
        """Find the running requests that did not get on since they were last scheduled.

        After a failed load the scheduler lets each affected request run again
        (``_update_requests_with_invalid_blocks``): the first holder of a lost block from that block on, the
        others from where they stood, as if they had it.
        """
        before, cached = self._num_computed_tokens, scheduler_output.scheduled_cached_reqs
        for req_id in gone:
            before.pop(req_id, None)
        for req_id, num_computed_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if num_computed_tokens <= before.get(req_id, -1) and req_id not in self._step.new:
                self._step.set_back.add(req_id)
            before[req_id] = num_computed_tokens
        for request in scheduler_output.scheduled_new_reqs:
            before[request.req_id] = request.num_computed_tokens

    def _note_deltas(self, scheduler_output: Any, finished: list[str], preempted: list[str]) -> None:
        # Copies: the engine extends its lists in place.
        def copied(rows: Rows) -> list[list[int]]:
            return [list(row) for row in self.groups.rows(rows)]

        deltas, cached = self._deltas, scheduler_output.scheduled_cached_reqs
        deltas.finished += finished
        deltas.preempted += preempted
        deltas.new += [
            (request.req_id, request.num_computed_tokens, copied(request.block_ids))
            for request in scheduler_output.scheduled_new_reqs
        ]
        for req_id, num_computed_tokens, new_block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if new_block_ids is None:
                continue
            if req_id in cached.resumed_req_ids:
                deltas.resumed.append((req_id, num_computed_tokens, copied(new_block_ids)))
            else:
                deltas.appended.append((req_id, copied(new_block_ids)))

    def _is_safe(self, batch: Batch) -> bool:
        if len(batch.req_ids) < 2:
            return True
        first_cut, last_cut = _cuts(batch)
        slots = self._slots_in_order(batch.req_ids)
        step = (slots, batch.num_computed_tokens, batch.num_scheduled_tokens)
        if self.mirror.is_safe(*step, first_cut, last_cut):
            return True
        if not self._step.unsafe:
            for _, _, reader, *_ in self.mirror.unsafe_cuts(*step, first_cut, last_cut):
                self._step.unsafe.add(self._kind(batch, reader))
        return False

    def _slots_in_order(self, req_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        if self._slots_of != req_ids:
            self._slots = self.mirror.slots(req_ids)
            self._slots_of = list(req_ids)
        return self._slots

    def _kind(self, batch: Batch, reader: int) -> str:
        if batch.req_ids[reader] not in self._step.new:
            return "running"
        return "short" if batch.num_scheduled_tokens[reader] <= batch.decode_threshold else "long"

    def _plan(self, batch: Batch) -> Order | None:
        if self._is_safe(batch):
            return None
        constraint = batch.order_constraint()
        if constraint is OrderConstraint.FIXED:
            return None
        phases = None
        if constraint is OrderConstraint.DECODES_LEAD:
            may_read = self._step.new | self._step.set_back
            phases = decode_phases(
                batch.num_computed_tokens,
                batch.num_scheduled_tokens,
                np.fromiter((req_id in may_read for req_id in batch.req_ids), np.bool_),
                batch.decode_threshold,
            )
        found = self.mirror.order(
            self._slots_in_order(batch.req_ids),
            batch.num_computed_tokens,
            batch.num_scheduled_tokens,
            phases,
        )
        if found is None:
            self._step.veto = Reason.NO_ORDER
            return None
        permutation, swaps, _ = found
        self.counters.reordered += 1
        self.counters.requests_moved += sum(place != source for place, source in enumerate(permutation))
        return Order(tuple(permutation), tuple(swaps))

    def _doubt(self) -> str | None:
        return self._not_understood or self._lost

    def _start_again(self) -> None:
        """Make the mirror anew from the engine's rows; the next step can be decided again."""
        if self._engine_rows is None:
            return
        with self.guarded("the mirror could not be made anew"):
            self.mirror.clear()
            self._slots_of = []
            self._num_computed_tokens.clear()
            for req_id, rows in self._engine_rows():
                self.mirror.add(req_id, self.groups.rows(rows))
            self._lost = None

    def _count(self, batch: Batch, safe: bool, reason: str, theirs: bool | None) -> None:
        counters = self.counters
        counters.steps += 1
        eligible = batch.eligible and len(batch.req_ids) > 1
        counters.eligible += eligible
        counters.eligible_allowed += eligible and safe
        counters.unsafe.update(self._step.unsafe)
        if not safe:
            counters.vetoed[reason] += 1
        if theirs is not None:
            counters.verdicts["allow" if safe else "veto", "allow" if theirs else "veto"] += 1

    def _record(self, batch: Batch, theirs: bool) -> None:
        deltas, self._deltas = self._deltas, _Deltas()
        try:
            if self.recorder is None:
                self.recorder = self._open_recorder(batch)
        except Exception as error:
            self._tracing = False
            self._log_once("trace", f"no trace is written ({error})")
            return
        self.recorder.record(
            deltas.finished,
            deltas.preempted,
            deltas.new,
            deltas.resumed,
            deltas.appended,
            zip(
                batch.req_ids,
                batch.num_computed_tokens.tolist(),
                batch.num_scheduled_tokens.tolist(),
                strict=True,
            ),
            theirs,
        )

    def _open_recorder(self, batch: Batch) -> StepRecorder:
        assert self.settings.trace is not None
        groups = self.groups.groups
        header = TraceHeader(
            block_sizes=tuple(group.tokens_per_column for group in groups),
            sliding_windows=tuple(group.sliding_window for group in groups),
            attention_chunk_sizes=tuple(group.attention_chunk_size for group in groups),
            num_blocks=max((group.num_blocks for group in groups), default=0),
            decode_threshold=batch.decode_threshold,
            num_ubatches=batch.num_ubatches,
            source="ubatch-guard",
        )
        return StepRecorder(
            trace_path(self.settings.trace, self._name), header, max_bytes=self.settings.trace_max_bytes
        )

    def _timed(self, started: int) -> None:
        self.counters.checks += 1
        self.counters.check_ns += time.perf_counter_ns() - started

    def _report(self) -> None:
        now = time.monotonic_ns()
        if now >= self._next_export:
            self._next_export = now + _EXPORT_NS
            if (export := default_export()) is not None:
                export.export(self.counters, self._exported)
        if self.settings.log_interval > 0 and now >= self._next_log:
            self._next_log = now + int(self.settings.log_interval * 1e9)
            logger.info("ubatch-guard (%s): %s", self.policy.value, self.counters.line())

    def _log_once(self, key: str, message: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            logger.warning("ubatch-guard: %s", message)


def trace_path(pattern: str, rank: str) -> Path:
    """Fill ``{pid}`` and ``{rank}`` into a trace pattern; a missing ``{pid}`` goes before its suffixes."""
    path = Path(pattern if "{pid}" in pattern else _with_pid(pattern))
    return Path(str(path).replace("{pid}", str(os.getpid())).replace("{rank}", rank))


def _with_pid(pattern: str) -> str:
    folder, separator, name = pattern.rpartition("/")
    stem, dot, suffixes = name.partition(".")
    return f"{folder}{separator}{stem}.{{pid}}{dot}{suffixes}"


def _cuts(batch: Batch) -> tuple[int | None, int | None]:
    """First and last cut that the vote can end in: `step.feasible_cuts` without its checks and objects."""
    if batch.any_cut:
        return None, None
    return max(1, batch.num_tokens // batch.num_ubatches), batch.num_tokens - 1


def _reason_of(error: BaseException) -> str:
    """A label for an error: its class in snake case, ``UnknownRequestError`` -> ``unknown_request``."""
    name = type(error).__name__.removesuffix("Error").removesuffix("Exception")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
