"""Counts over a step trace: what was hazardous, what vLLM's guard made of it, and what this one does."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ubatch_guard import reference
from ubatch_guard._core import GuardError
from ubatch_guard.eligibility import decode_phases, eligible
from ubatch_guard.guard import ALL_CUTS, Guard
from ubatch_guard.step import (
    CutRange,
    MirroredStep,
    Order,
    OrderConstraint,
    Policy,
    Reason,
    Step,
    UnsafeCuts,
    Verdict,
    feasible_cuts,
)
from ubatch_guard.trace.format import TraceError, TraceHeader
from ubatch_guard.trace.reader import TraceReader
from ubatch_guard.trace.records import StepRecord, apply_changes
from ubatch_guard.trace.replay import Replay, TooWideError

DBO_PREFILL_TOKEN_THRESHOLD = 512
DBO_DECODE_TOKEN_THRESHOLD = 32
"""vLLM's own defaults."""
PREFILL_TOKENS = 64
"""A step with a request of this many scheduled tokens counts as a prefill step."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """What to audit for.

    Attributes:
        policy: ``VETO`` or ``REORDER``: what becomes of a step with an unsafe feasible cut.
        prefill_token_threshold: Fewest tokens of a step that is split (vLLM's
            ``--dbo-prefill-token-threshold``).
        decode_token_threshold: The same where every query is a decode with all its drafts
            (``--dbo-decode-token-threshold``).
        reference: Decide with the slow reference instead of the core.
        partial: Count the whole lines of a trace that breaks off.
    """

    policy: Policy = Policy.REORDER
    prefill_token_threshold: int = DBO_PREFILL_TOKEN_THRESHOLD
    decode_token_threshold: int = DBO_DECODE_TOKEN_THRESHOLD
    reference: bool = False
    partial: bool = False


@dataclass(frozen=True, slots=True)
class AuditedStep:
    """A step, and what came out of it.

    Attributes:
        line: Line of the trace.
        record: The step.
        header: What the steps of its trace have in common.
        verdict: What the guard says; its unsafe cuts are the feasible ones. None: the step is not eligible.
        hazardous: Unsafe at one of vLLM's own cuts.
    """

    line: int
    record: StepRecord
    header: TraceHeader
    verdict: Verdict | None
    hazardous: bool

    @property
    def feasible(self) -> CutRange:
        """The cuts that were asked about."""
        return feasible_cuts(self.record.num_tokens, self.header.num_ubatches)

    @property
    def cuts(self) -> tuple[int, ...]:
        """VLLM's own cuts, those that `hazardous` is about."""
        cut = self.record.num_tokens // self.header.num_ubatches
        return tuple(cut * index for index in range(1, self.header.num_ubatches)) if cut else ()


@dataclass(slots=True)
class TraceAudit:
    """Counts of one trace's steps, and how long the guard took for each eligible one.

    Attributes:
        trace: Name of the file.
        steps: All steps.
        eligible: Two requests or more, and as many tokens as the thresholds ask for.
        hazardous: Eligible, with a hazard at one of vLLM's cuts ``i * (tokens // num_ubatches)``.
        hazardous_any_cut: Eligible, with a hazard at some feasible cut.
        engine_vetoed: Eligible, and vLLM's guard refused.
        engine_missed: ``hazardous``, and vLLM's guard let it through.
        engine_needless: Eligible, not ``hazardous_any_cut``, and vLLM's guard refused.
        prefill_eligible: Eligible, with a request of 64 scheduled tokens or more.
        prefill_engine_vetoed: Those of them that vLLM's guard refused.
        kept: Eligible steps that run split under the policy.
        vetoed: Eligible steps that run whole under the policy.
        reordered: ``hazardous_any_cut``, and kept in an order without any unsafe cut.
        eligible_tokens: Scheduled tokens of the eligible steps.
        kept_tokens: Those of them in steps that run split under the policy.
        safe_tokens: Those of them in steps that are safe at any feasible cut.
        engine_kept_tokens: Those of them in steps that vLLM's guard let through.
        cut: Steps that were really cut; None: the trace says it of no step.
        cut_unsafe: Those of them that were cut where it is unsafe.
        check_us_p50: Median time of the guard's answer to an eligible step, in microseconds, if there is one.
        check_us_p99: The 99th percentile.
    """

    trace: str
    steps: int = 0
    eligible: int = 0
    hazardous: int = 0
    hazardous_any_cut: int = 0
    engine_vetoed: int = 0
    engine_missed: int = 0
    engine_needless: int = 0
    prefill_eligible: int = 0
    prefill_engine_vetoed: int = 0
    kept: int = 0
    vetoed: int = 0
    reordered: int = 0
    eligible_tokens: int = 0
    kept_tokens: int = 0
    safe_tokens: int = 0
    engine_kept_tokens: int = 0
    cut: int | None = None
    cut_unsafe: int | None = None
    check_us_p50: float | None = None
    check_us_p99: float | None = None


class Auditor:
    """Audits steps one after the other, wherever they come from.

    Args:
        trace: Name of the trace, for the counts.
        header: What the steps have in common.
        options: What to audit for.
        on_audited: Called with each step.

    Raises:
        GuardError: The core does not take such groups.
    """

    def __init__(
        self,
        trace: str,
        header: TraceHeader,
        options: AuditOptions,
        *,
        on_audited: Callable[[AuditedStep], None] | None = None,
    ) -> None:
        self._header = header
        self._options = options
        self._on_audited = on_audited
        self._decider: _Decider = (_ReferenceDecider if options.reference else _CoreDecider)(
            header, options.policy
        )
        self._audit = TraceAudit(trace)
        self._seconds = array("d")

    def step(self, record: StepRecord, line: int) -> None:
        """Count one step, which follows on the ones before.

        Raises:
            GuardError: A row holds a block that is not in its pool.
            TooWideError: The step's block tables would be too large (with the reference alone).
            MemoryError: There is no memory for what has to be kept.
        """
        audit, decider = self._audit, self._decider
        audit.steps += 1
        decider.update(record)
        if record.cuts is not None:
            audit.cut = (audit.cut or 0) + bool(record.cuts)
            unsafe = any(decider.is_unsafe_cut(record, cut) for cut in record.cuts)
            audit.cut_unsafe = (audit.cut_unsafe or 0) + unsafe
        verdict, hazardous = None, False
        if _eligible(record, self._header, self._options):
            verdict, took = decider.decide(record)
            self._seconds.append(took)
            if verdict.order is not None and not decider.is_safe(record, verdict.order):
                verdict = Verdict(False, Reason.NO_ORDER, verdict.unsafe)
            hazardous = _is_hazardous(record, self._header.num_ubatches, verdict)
            _count(audit, record, verdict, hazardous=hazardous)
        if self._on_audited is not None:
            self._on_audited(AuditedStep(line, record, self._header, verdict, hazardous))

    def result(self) -> TraceAudit:
        """The counts of the steps so far."""
        if self._seconds:
            p50, p99 = np.percentile(np.frombuffer(self._seconds) * 1e6, (50, 99)).tolist()
            self._audit.check_us_p50, self._audit.check_us_p99 = round(p50, 3), round(p99, 3)
        return replace(self._audit)


def audit_trace(
    path: str | Path,
    options: AuditOptions,
    *,
    on_audited: Callable[[AuditedStep], None] | None = None,
    on_step: Callable[[TraceReader], None] | None = None,
) -> TraceAudit:
    """Audit one trace.

    Args:
        path: The trace.
        options: What to audit for.
        on_audited: Called with each step.
        on_step: Called after each step, for a progress bar.

    Raises:
        TraceError: The trace cannot be read, or holds a step that cannot be.
    """
    with TraceReader(path, partial=options.partial) as reader:
        try:
            auditor = Auditor(Path(path).name, reader.header, options, on_audited=on_audited)
            for record in reader:
                auditor.step(record, reader.line)
                if on_step is not None:
                    on_step(reader)
        except (GuardError, TooWideError) as error:
            raise TraceError(reader.path, reader.line, str(error)) from error
        except MemoryError as error:
            raise TraceError(reader.path, reader.line, "more than there is memory for") from error
    return auditor.result()


class _Decider(Protocol):
    """What decides about the steps of a trace."""

    def update(self, record: StepRecord) -> None:
        """Take over what became of the rows before a step."""

    def decide(self, record: StepRecord) -> tuple[Verdict, float]:
        """The verdict on every feasible cut of the step, and the seconds it took."""

    def is_safe(self, record: StepRecord, order: Order) -> bool:
        """Whether the step has no unsafe cut at all in another order."""

    def is_unsafe_cut(self, record: StepRecord, cut: int) -> bool:
        """Whether the step is unsafe when it is cut just there."""


class _CoreDecider:
    """The guard as an engine has it, on a mirror of the block tables."""

    def __init__(self, header: TraceHeader, policy: Policy) -> None:
        self._guard = Guard(header.groups, policy, header.num_ubatches)
        self._decode_threshold = header.decode_threshold

    def update(self, record: StepRecord) -> None:
        apply_changes(self._guard.mirror, record.changes)

    def decide(self, record: StepRecord) -> tuple[Verdict, float]:
        phases = decodes_lead(record, self._decode_threshold)
        began = time.perf_counter()
        verdict = self._guard.decide(
            self._step(record), phases=phases, constraint=OrderConstraint.DECODES_LEAD
        )
        return verdict, time.perf_counter() - began

    def is_safe(self, record: StepRecord, order: Order) -> bool:
        index = np.array(order.permutation)
        step = self._step(record)
        reordered = MirroredStep(
            step.slots[index], step.num_computed_tokens[index], step.num_scheduled_tokens[index]
        )
        return self._guard.is_safe(reordered, ALL_CUTS)

    def is_unsafe_cut(self, record: StepRecord, cut: int) -> bool:
        return not self._guard.is_safe(self._step(record), CutRange(cut, cut))

    def _step(self, record: StepRecord) -> MirroredStep:
        return MirroredStep(
            self._guard.mirror.slots(record.request_ids),
            record.num_computed_tokens,
            record.num_scheduled_tokens,
        )


class _ReferenceDecider:
    """The slow reference, on block tables of each step."""

    def __init__(self, header: TraceHeader, policy: Policy) -> None:
        self._header = header
        self._policy = policy
        self._replay = Replay(header)
        self._step: Step

    def update(self, record: StepRecord) -> None:
        self._step = self._replay.step(record)

    def decide(self, record: StepRecord) -> tuple[Verdict, float]:
        phases = decodes_lead(record, self._header.decode_threshold)
        began = time.perf_counter()
        feasible = feasible_cuts(self._step.num_tokens, self._header.num_ubatches)
        unsafe = reference.unsafe_cuts(self._step, feasible)
        permutation = None
        if unsafe and self._policy is Policy.REORDER:
            permutation = reference.order(self._step, phases.tolist())
        seconds = time.perf_counter() - began
        if not unsafe:
            return Verdict(True, Reason.SAFE), seconds
        if permutation is None:
            return Verdict(False, Reason.UNSAFE, unsafe), seconds
        return Verdict(True, Reason.REORDERED, unsafe, Order(permutation, ())), seconds

    def is_safe(self, record: StepRecord, order: Order) -> bool:
        return not reference.unsafe_cuts(self._step.permuted(order.permutation))

    def is_unsafe_cut(self, record: StepRecord, cut: int) -> bool:
        return bool(reference.unsafe_cuts(self._step, CutRange(cut, cut)))


def _eligible(record: StepRecord, header: TraceHeader, options: AuditOptions) -> bool:
    return eligible(
        record.num_tokens,
        record.num_scheduled_tokens,
        decode_query_len=header.decode_query_len,
        decode_token_threshold=options.decode_token_threshold,
        prefill_token_threshold=options.prefill_token_threshold,
    )


def decodes_lead(record: StepRecord, decode_threshold: int | None) -> npt.NDArray[np.int8]:
    """int8, shape ``[num_reqs]``: the phases of a step's requests, by `decode_phases`."""
    may_read = record.changes.may_read(record.request_ids)
    return decode_phases(record.num_computed_tokens, record.num_scheduled_tokens, may_read, decode_threshold)


def _is_hazardous(record: StepRecord, num_ubatches: int, verdict: Verdict) -> bool:
    cut = record.num_tokens // num_ubatches
    return any(_has_multiple(unsafe, cut, num_ubatches) for unsafe in verdict.unsafe)


def _count(audit: TraceAudit, record: StepRecord, verdict: Verdict, *, hazardous: bool) -> None:
    prefill = bool(record.num_scheduled_tokens.max() >= PREFILL_TOKENS)
    refused = not record.vllm_allows
    tokens = record.num_tokens
    audit.eligible += 1
    audit.hazardous += hazardous
    audit.hazardous_any_cut += bool(verdict.unsafe)
    audit.engine_vetoed += refused
    audit.engine_missed += hazardous and not refused
    audit.engine_needless += refused and not verdict.unsafe
    audit.prefill_eligible += prefill
    audit.prefill_engine_vetoed += prefill and refused
    audit.kept += verdict.allow
    audit.vetoed += not verdict.allow
    audit.reordered += verdict.reason is Reason.REORDERED
    audit.eligible_tokens += tokens
    audit.kept_tokens += tokens * verdict.allow
    audit.safe_tokens += tokens * (not verdict.unsafe)
    audit.engine_kept_tokens += tokens * (not refused)


def _has_multiple(unsafe: UnsafeCuts, cut: int, num_ubatches: int) -> bool:
    """Whether one of ``cut``, ``2 * cut`` to ``(num_ubatches - 1) * cut`` is among the unsafe cuts."""
    if cut == 0:
        return False
    index = -(-unsafe.first // cut)
    return index < num_ubatches and index * cut <= unsafe.last
