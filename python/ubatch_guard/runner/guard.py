"""`RunnerGuard`: says of every step of one runner whether it may be cut, and in which order."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ubatch_guard._core import Mirror
from ubatch_guard.counters import Counters
from ubatch_guard.eligibility import decode_phases
from ubatch_guard.kv_cache_groups import EngineGroups
from ubatch_guard.log import described
from ubatch_guard.runner.batch import Batch
from ubatch_guard.runner.report import Report
from ubatch_guard.runner.step_trace import StepTrace
from ubatch_guard.settings import Settings
from ubatch_guard.step import IntArray, Order, OrderConstraint, Policy, Reason
from ubatch_guard.trace.recorder import StepRecorder
from ubatch_guard.trace.records import Changes

_UNASKED = 100
"""Steps without a vote after which it is said loudly."""
_FINDINGS_LOGGED = 20


class Rows(Protocol):
    """What a guard has to know of who reads and writes what; see `ubatch_guard.vllm.followed_rows`."""

    groups: EngineGroups
    mirror: Mirror
    complete: bool
    new: set[str] | frozenset[str]
    set_back: dict[str, int]
    loads_kv: bool

    @property
    def restartable(self) -> bool:
        """It can do without having seen some steps."""

    def note(self, scheduler_output: Any) -> None:
        """Keep what the scheduler changed."""

    def changes(self, scheduler_output: Any) -> Changes:
        """The same for a trace."""

    def may_read(
        self,
        req_ids: Sequence[str],
        num_computed_tokens: IntArray,
        prefilling: npt.NDArray[np.bool_] | None = None,
    ) -> bool:
        """Whether some request may read what is written in the step under way."""

    def take_in(self) -> None:
        """Bring the mirror up to date."""

    def doubt(self) -> None:
        """Make the mirror anew before it is asked again."""

    def slots(self, req_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """The mirror's handles of a batch."""


class _Step:
    """What is known of the step under way.

    Attributes:
        failed: Why it cannot be decided; None: nothing went wrong.
        veto: Why it is vetoed, should it be.
        unsafe: Kinds of readers that an unsafe cut was found for, before any reordering.
        safe: The batch as it was found safe; this very object need not be looked at again.
        as_scheduled: It was put into the scheduler's order, which needs no look at rows.
        voted: It was voted on.
        settled: It is known whether it was cut.
    """

    __slots__ = ("as_scheduled", "failed", "safe", "settled", "unsafe", "veto", "voted")

    def __init__(self) -> None:
        self.unsafe: set[str] = set()
        self.safe: Batch | None = None
        self.reset()

    def reset(self) -> None:
        """Another step begins."""
        self.failed: str | None = None
        self.veto = Reason.UNSAFE.value
        self.safe = None
        self.as_scheduled = self.voted = self.settled = False
        if self.unsafe:
            self.unsafe = set()


class _Guarded:
    """The context manager of `RunnerGuard.guarded`; several a step, so made once and without a generator."""

    __slots__ = ("_guard", "_what")

    def __init__(self, guard: RunnerGuard, what: str) -> None:
        self._guard = guard
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None:
            return False
        self._guard.fail(_reason_of(error), f"{self._what} ({described(error)})")
        # An interrupt goes on its way, but not before the rows are doubted.
        return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


class RunnerGuard:
    """Verdicts and counts of one model runner.

    Every method is called from the thread that runs the steps. None raises: what goes wrong is counted,
    logged once, and makes the guard vote "no" on the step, since an exception on one data-parallel rank
    hangs the others.

    Args:
        rows: Who may read, and the block rows that tell.
        settings: ``settings.policy`` must not be None.
        name: Of the worker, for the trace's file name.
        runner: What kind of runner it is, for the metrics.
        not_understood: Why the engine's KV cache groups are not understood; then every step in which some
            request may read is voted "no" on. None: they are.

    Attributes:
        counters: What it has seen and done.
        finding: A microbatch was seen to read what a later one writes, in spite of this guard: steps in which
            some request may read are voted "no" on from then on.
    """

    def __init__(
        self,
        rows: Rows,
        settings: Settings,
        name: str = "0",
        runner: str = "",
        not_understood: str | None = None,
    ) -> None:
        if settings.policy is None:
            raise ValueError("a guard that is off has no RunnerGuard")
        self.policy = settings.policy
        self.settings = settings
        self.counters = Counters()
        self.rows = rows
        self.report = Report(settings.policy.value, runner, self.counters, settings.log_interval)
        self.trace = StepTrace(settings, name, self.report, self.counters)
        self.finding = False
        self._step = _Step()
        self._observed: Any = None
        self._asking_engine = False
        self._guarded: dict[str, _Guarded] = {}
        self._not_understood: str | None = None
        if not_understood is not None:
            self._not_understood = "unknown_group"
            self.report.guarded = "steps that admit a request run whole"
            self.report.once("unknown_group", f"{not_understood}: {self.report.guarded}")

    @property
    def mirror(self) -> Mirror:
        """The block tables as the guard knows them, brought up to date."""
        with self.guarded("the scheduler's changes could not be followed"):
            self.rows.take_in()
        return self.rows.mirror

    def retire(self) -> None:
        """Another guard takes over: close the trace, and leave the metrics."""
        self.trace.retire()
        self.report.retire()

    @property
    def recorder(self) -> StepRecorder | None:
        """What writes the trace, with all steps that were voted on; None: nothing was recorded yet."""
        self.trace.settle(None, None)
        return self.trace.recorder

    def observe(self, scheduler_output: Any) -> None:
        """Take note of what the scheduler changed, before the runner does; once per ``scheduler_output``."""
        if scheduler_output is self._observed:
            return
        if self.step_open:
            self._count_unasked()
        self._step.reset()
        with self.guarded("the scheduler's changes could not be followed"):
            self.rows.note(scheduler_output)
            if self.trace.on:
                self.trace.note(self.rows.changes(scheduler_output))
        # Last: a step that is tried again after an interrupt is looked at again.
        self._observed = scheduler_output

    @property
    def scheduled(self) -> Any:
        """The scheduler output of the step under way, as `observe` was given it; None: there is none."""
        return self._observed

    @property
    def may_plan(self) -> bool:
        """Whether the step under way may need an order, as far as it was looked at: most admit nobody."""
        readers = self.rows.new or self.rows.set_back
        return bool(readers) and self.policy is Policy.REORDER and self._undecided() is None

    def wants_order(self, req_ids: Sequence[str], num_computed_tokens: IntArray) -> bool:
        """The same of a batch: whether it is worth planning an order for."""
        return len(req_ids) > 1 and self.rows.may_read(req_ids, num_computed_tokens) and self.may_plan

    def plan(self, batch: Batch) -> Order | None:
        """The order to run ``batch`` in; None: leave it. Votes on nothing."""
        if batch.refusal is not None or not self.wants_order(batch.req_ids, batch.num_computed_tokens):
            return None
        started = time.perf_counter_ns()
        order = None
        with self.guarded("no order could be planned"):
            self.rows.take_in()
            order = self._plan(batch)
        self._timed(started)
        return order

    def skip(self) -> None:
        """Leave a step out in which no cut can come."""
        self._observed = None
        self.rows.doubt()

    def must_look(self) -> bool:
        """Whether the step under way has to be voted on by its batch; else `vote_without_readers` will do."""
        rows = self.rows
        return (
            bool(rows.new)
            or rows.loads_kv
            or bool(rows.set_back)
            or self.trace.on
            or self._step.failed is not None
        )

    def vote_without_readers(self, num_reqs: int, eligible: bool) -> bool:
        """`vote` in a step in which nobody may read, or no cut can come: True, and counted."""
        step = self._step
        if not step.voted:
            step.voted = True
            counters = self.counters
            counters.steps += 1
            if eligible and num_reqs > 1:
                counters.eligible += 1
                counters.eligible_allowed += 1
        self.report.now_and_then()
        return True

    def vote(self, batch: Batch, ask_engine: Callable[[], bool] | None = None) -> bool:
        """Whether ``batch``, as it stands, may be cut.

        Args:
            batch: The step in its final order.
            ask_engine: The engine's own verdict; None: it has none. It can be slow, so it is asked only for
                the trace, and at every verification. Where the policy only observes, its verdict is the
                caller's to return (`watch`).
        """
        theirs = self._ask(ask_engine) if ask_engine is not None and self._wants_theirs() else None
        safe = self._decide(batch)
        self._conclude(batch, safe, theirs)
        return safe

    def watch(self, batch: Batch, theirs: bool, microbatches: bool = True) -> None:
        """Count what the guard would do about a step that the engine decides on itself, and record it.

        Args:
            batch: The step.
            theirs: The engine's verdict.
            microbatches: The engine cuts steps at all; otherwise it is only recorded.
        """
        if microbatches:
            self._conclude(batch, self._decide(batch), theirs)
        elif not self._step.voted:
            self._step.voted = True
            self._record(batch, theirs)

    def asking(self, ask_engine: Callable[[], bool]) -> bool:
        """The engine's own verdict, which may go through this very guard again; raises what it raises."""
        self._asking_engine = True
        try:
            return ask_engine()
        finally:
            self._asking_engine = False

    def settle(self, cut: bool, cuts: Sequence[int] | None = None) -> None:
        """The ranks have voted on the step under way.

        Args:
            cut: It is cut.
            cuts: Where, in tokens, if that is known.
        """
        step = self._step
        if step.voted and not step.settled:
            step.settled = True
            self.counters.cut += cut
            if self.trace.on:
                self.trace.settle(cuts if cut else (), True if cut else None)

    def refuse(self) -> bool:
        """Vote "no" on a step that could not even be read."""
        self._conclude(None, False, None)
        return False

    @property
    def step_open(self) -> bool:
        """A step was scheduled and not voted on yet."""
        return self._observed is not None and not self._step.voted

    @property
    def step_voted(self) -> bool:
        """The step under way has been voted on."""
        return self._step.voted

    @property
    def step_running(self) -> bool:
        """A step was scheduled, and it is not known yet whether it is cut."""
        return self._observed is not None and not self._step.settled

    @property
    def may_skip(self) -> bool:
        """Steps in which no cut can come need not be observed."""
        return not self.trace.on and self.rows.restartable

    @property
    def asking_engine(self) -> bool:
        """The engine's own verdict is being asked, which may go through this very guard again."""
        return self._asking_engine

    def compare(
        self,
        req_ids: Sequence[str],
        group: int,
        block_table: IntArray,
        num_blocks_per_row: IntArray,
    ) -> None:
        """Count a difference between the mirror and the engine's own block table of a group.

        Args:
            req_ids: The batch.
            group: Place in the mirror's groups.
            block_table: int32 or int64, shape ``[len(req_ids), columns]``.
            num_blocks_per_row: int32 or int64, shape ``[len(req_ids)]``.
        """
        self.rows.take_in()
        found = self.rows.mirror.first_difference(
            self.rows.slots(req_ids), group, block_table, num_blocks_per_row
        )
        if found is not None:
            row, column = found
            self.counters.mirror_differences += 1
            where = f"{req_ids[row]!r}, group {group}, column {column}"
            self.fail("mirror_difference", f"the block table is not what was scheduled: {where}")

    def found(self, message: str) -> None:
        """Count a read of what a later microbatch writes, in a step that was really cut."""
        self.counters.verify_findings += 1
        if self.counters.verify_findings <= _FINDINGS_LOGGED:
            self.report.once(f"finding {self.counters.verify_findings}", message, logging.ERROR)
        if not self.finding and self.policy is not Policy.OBSERVE:
            self.finding = True
            self.report.guarded = "a cut was wrong in spite of it"
            self.report.once(
                "finding",
                "a cut was wrong in spite of the guard: steps that admit a request run whole from now on. "
                "Please report this.",
                logging.ERROR,
            )

    def fail(self, why: str, message: str) -> None:
        """Vote "no" on the step under way, and doubt the rows."""
        self._step.failed = why
        consequence = "" if self.policy is Policy.OBSERVE else "; voting no"
        self.report.once(why, message + consequence)
        self.rows.doubt()
        self.trace.end(message)

    def verify_due(self) -> bool:
        """Whether this is a step whose mirror is to be compared with the runner's own block table."""
        every = self.settings.verify_every
        return every > 0 and self.counters.steps % every == 0 and self._undecided() is None

    def cut_check_due(self) -> bool:
        """Whether the step that is being cut is one to check at the cut itself."""
        every = self.settings.verify_every
        return every > 0 and (self.counters.cut - 1) % every == 0

    def guarded(self, what: str) -> _Guarded:
        """Log what the block raises, vote "no" on the step, and doubt the rows. Interrupts go on."""
        guarded = self._guarded.get(what)
        if guarded is None:
            guarded = self._guarded[what] = _Guarded(self, what)
        return guarded

    def _undecided(self) -> str | None:
        return self._not_understood or self._step.failed

    def _wants_theirs(self) -> bool:
        return self.trace.on or self.verify_due()

    def _ask(self, ask_engine: Callable[[], bool]) -> bool | None:
        try:
            return self.asking(ask_engine)
        except Exception as error:
            self.report.once("engine", f"the engine's own verdict: {described(error)}")
            self.trace.end("the engine's own verdict cannot be had")
            return None

    def _decide(self, batch: Batch) -> bool:
        """Whether the step may be cut; why not is left in the step's ``veto``."""
        started = time.perf_counter_ns()
        safe = False
        with self.guarded("the step could not be checked"):
            safe = self._is_allowed(batch)
        if self._step.failed is not None:
            safe = False
        self._timed(started)
        return safe

    # What follows may raise; the methods above catch it.

    def _is_allowed(self, batch: Batch) -> bool:
        step = self._step
        if step.failed is not None:
            return False
        if len(batch.req_ids) < 2 or not self.rows.may_read(batch.req_ids, batch.num_computed_tokens):
            return True
        refusal = batch.refusal or self._not_understood or ("finding" if self.finding else None)
        if refusal is None:
            if step.as_scheduled or step.safe is batch:
                return True
            self.rows.take_in()
            if batch.unsure is None:
                return self._is_safe(batch)
            refusal = batch.unsure
        if step.veto == Reason.UNSAFE.value:
            step.veto = refusal
        return False

    def _is_safe(self, batch: Batch) -> bool:
        cuts = (None, None) if batch.cuts is None else batch.cuts
        mirror = self.rows.mirror
        step = (self.rows.slots(batch.req_ids), batch.num_computed_tokens, batch.num_scheduled_tokens)
        if mirror.is_safe(*step, *cuts):
            return True
        if not self._step.unsafe:
            for _, _, reader, *_ in mirror.unsafe_cuts(*step, *cuts):
                self._step.unsafe.add(self._kind(batch, reader))
        return False

    def _kind(self, batch: Batch, reader: int) -> str:
        if batch.req_ids[reader] not in self.rows.new:
            return "running"
        return "short" if batch.num_scheduled_tokens[reader] <= (batch.decode_threshold or 1) else "long"

    def _plan(self, batch: Batch) -> Order | None:
        if batch.unsure is None and self._is_safe(batch):
            self._step.safe = batch
            return None
        constraint = batch.order_constraint()
        if constraint is OrderConstraint.FIXED:
            return None
        order = None if batch.unsure == "unknown_request" else self._order(batch, constraint)
        if order is None and batch.as_scheduled is not None:
            permutation = tuple(batch.as_scheduled())
            order = Order(permutation, (), demoted_by(batch, permutation))
            self._step.as_scheduled = True
        if order is None:
            self._step.veto = Reason.NO_ORDER.value
            return None
        if not self._may_demote(batch, order):
            self._step.veto = Reason.DEMOTES.value
            self._step.as_scheduled = False
            return None
        self.counters.reordered += 1
        self.counters.requests_moved += sum(place != source for place, source in enumerate(order.permutation))
        return order

    def _order(self, batch: Batch, constraint: OrderConstraint) -> Order | None:
        phases = None
        if constraint is OrderConstraint.DECODES_LEAD or not self.rows.complete:
            rows = self.rows
            may_read = rows.new if not rows.set_back else rows.new | rows.set_back.keys()
            phases = decode_phases(
                batch.num_computed_tokens,
                batch.num_scheduled_tokens,
                np.fromiter((req_id in may_read for req_id in batch.req_ids), np.bool_, len(batch.req_ids)),
                batch.decode_threshold or 1,
            )
        found = self.rows.mirror.order(
            self.rows.slots(batch.req_ids),
            batch.num_computed_tokens,
            batch.num_scheduled_tokens,
            phases,
            batch.decode_threshold,
        )
        if found is None:
            return None
        permutation, swaps, demoted = found
        return Order(tuple(permutation), tuple(swaps), tuple(demoted))

    def _may_demote(self, batch: Batch, order: Order) -> bool:
        """Whether the order takes no more context from the decodes than it may; counts what it takes."""
        if not order.demoted:
            return True
        num_tokens = order.num_demoted_tokens(batch.num_computed_tokens, batch.num_scheduled_tokens)
        if self.settings.max_demoted_tokens is not None and num_tokens > self.settings.max_demoted_tokens:
            return False
        self.counters.demoted_requests += len(order.demoted)
        self.counters.demoted_tokens += num_tokens
        return True

    def _conclude(self, batch: Batch | None, safe: bool, theirs: bool | None) -> None:
        """Count and record the step, once; never raises."""
        step, counters = self._step, self.counters
        if not step.voted:
            step.voted = True
            counters.steps += 1
            eligible = batch is not None and batch.eligible and len(batch.req_ids) > 1
            counters.eligible += eligible
            counters.eligible_allowed += eligible and safe
            counters.unsafe.update(step.unsafe)
            if not safe:
                counters.vetoed[step.failed or step.veto] += 1
            if theirs is not None:
                counters.verdicts["allow" if safe else "veto", "allow" if theirs else "veto"] += 1
            self._record(batch, theirs)
        self.report.now_and_then()

    def _record(self, batch: Batch | None, theirs: bool | None) -> None:
        if not self.trace.on:
            return
        if batch is None:
            self.trace.end("a step could not be read")
        else:
            self.trace.record(batch, self.rows.groups.groups, theirs, list(self.rows.set_back))

    def _count_unasked(self) -> None:
        if not getattr(self._observed, "num_scheduled_tokens", None):
            # Nothing to run, nothing to cut.
            return
        self.counters.unasked += 1
        if self.counters.unasked == _UNASKED:
            self.report.once(
                "unasked",
                f"{_UNASKED} steps were scheduled and never voted on: whatever runs them does not ask "
                "before it cuts, and they are NOT guarded",
                logging.ERROR,
            )

    def _timed(self, started: int) -> None:
        self.counters.checks += 1
        self.counters.check_ns += time.perf_counter_ns() - started


def demoted_by(batch: Batch, permutation: Sequence[int]) -> tuple[int, ...]:
    """`Order.demoted` of an order that was not found by the core."""
    if batch.decode_threshold is None:
        return ()
    order = np.asarray(permutation, dtype=np.intp)
    is_long = batch.num_scheduled_tokens > batch.decode_threshold
    if not is_long.any():
        return ()
    behind = order[int(is_long[order].argmax()) :]
    return tuple(sorted(behind[behind < int(is_long.argmax())].tolist()))


def _reason_of(error: BaseException) -> str:
    """A label for an error: its class in snake case, ``UnknownRequestError`` -> ``unknown_request``."""
    name = type(error).__name__.removesuffix("Error").removesuffix("Exception")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
