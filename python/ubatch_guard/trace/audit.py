"""Counts over a step trace: what was hazardous, what vLLM's guard made of it, and what this one does."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ubatch_guard import reference
from ubatch_guard._core import GuardError, Mirror
from ubatch_guard.step import CutRange, Phase, Policy, Step, UnsafeCuts, feasible_cuts
from ubatch_guard.trace.format import StepRecord, TraceError, TraceHeader, TraceReader
from ubatch_guard.trace.replay import Replay

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
        decode_token_threshold: The same where every query is one token (``--dbo-decode-token-threshold``).
        reference: Decide with the slow reference instead of the core.
        partial: Count the whole lines of a trace that breaks off.
    """

    policy: Policy = Policy.REORDER
    prefill_token_threshold: int = DBO_PREFILL_TOKEN_THRESHOLD
    decode_token_threshold: int = DBO_DECODE_TOKEN_THRESHOLD
    reference: bool = False
    partial: bool = False


@dataclass(frozen=True, slots=True)
class UnsafeStep:
    """A step with an unsafe feasible cut, and what became of it.

    Attributes:
        line: Line of the trace.
        request_ids: The batch, in order.
        feasible: The cuts that were asked about.
        unsafe: The unsafe ones of them.
        permutation: Batch order without any unsafe cut, as positions of the present one, or None: vetoed.
    """

    line: int
    request_ids: tuple[str, ...]
    feasible: CutRange
    unsafe: tuple[UnsafeCuts, ...]
    permutation: tuple[int, ...] | None


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
    check_us_p50: float | None = None
    check_us_p99: float | None = None


def audit_trace(
    path: str | Path,
    options: AuditOptions,
    *,
    on_unsafe: Callable[[UnsafeStep], None] | None = None,
    on_step: Callable[[TraceReader], None] | None = None,
) -> TraceAudit:
    """Audit one trace.

    Args:
        path: The trace.
        options: What to audit for.
        on_unsafe: Called with each step that has an unsafe feasible cut.
        on_step: Called after each step.

    Raises:
        TraceError: The trace cannot be read, or holds a step that cannot be.
    """
    audit = TraceAudit(trace=Path(path).name)
    seconds = array("d")
    with TraceReader(path, partial=options.partial) as reader:
        guard: _Guard = (_ReferenceGuard if options.reference else _MirrorGuard)(reader.header)
        for record in reader:
            try:
                guard.update(record)
                if _eligible(record, options):
                    answer = _answer(guard, record, reader.header, options.policy)
                    seconds.append(answer.seconds)
                    _count(audit, record, reader.header, answer)
                    if answer.unsafe and on_unsafe is not None:
                        on_unsafe(
                            UnsafeStep(
                                line=reader.line,
                                request_ids=record.request_ids,
                                feasible=answer.feasible,
                                unsafe=answer.unsafe,
                                permutation=answer.permutation,
                            )
                        )
            except GuardError as error:
                raise TraceError(reader.path, reader.line, str(error)) from error
            audit.steps += 1
            if on_step is not None:
                on_step(reader)
    if seconds:
        p50, p99 = np.percentile(np.frombuffer(seconds) * 1e6, (50, 99)).tolist()
        audit.check_us_p50, audit.check_us_p99 = round(p50, 3), round(p99, 3)
    return audit


class _Guard(Protocol):
    """What decides: the mirror or the reference."""

    def update(self, record: StepRecord) -> None:
        """Take over what became of the rows before a step."""

    def unsafe_cuts(self, record: StepRecord, cuts: CutRange) -> tuple[UnsafeCuts, ...]:
        """The unsafe cuts of the step among ``cuts``."""

    def order(self, record: StepRecord, phases: npt.NDArray[np.int8]) -> tuple[int, ...] | None:
        """An order without unsafe cuts."""

    def is_safe(self, record: StepRecord, permutation: tuple[int, ...]) -> bool:
        """Whether the step has no unsafe cut at all in another order."""


class _MirrorGuard:
    """The Rust core, one look per written block."""

    def __init__(self, header: TraceHeader) -> None:
        self._mirror = Mirror(header.groups)

    def update(self, record: StepRecord) -> None:
        mirror = self._mirror
        for request_id in (*record.finished, *record.preempted):
            # One that finishes while it is preempted has no row any more.
            if request_id in mirror:
                mirror.free(request_id)
        for entry in (*record.new, *record.resumed):
            (mirror.replace if entry.request_id in mirror else mirror.add)(entry.request_id, entry.rows)
        for growth in record.appended:
            mirror.append(growth.request_id, growth.rows)

    def unsafe_cuts(self, record: StepRecord, cuts: CutRange) -> tuple[UnsafeCuts, ...]:
        slots = self._mirror.slots(record.request_ids)
        found = self._mirror.unsafe_cuts(
            slots, record.num_computed_tokens, record.num_scheduled_tokens, cuts.first, cuts.last
        )
        return tuple(UnsafeCuts(*fields) for fields in found)

    def order(self, record: StepRecord, phases: npt.NDArray[np.int8]) -> tuple[int, ...] | None:
        slots = self._mirror.slots(record.request_ids)
        found = self._mirror.order(slots, record.num_computed_tokens, record.num_scheduled_tokens, phases)
        return None if found is None else tuple(found[0])

    def is_safe(self, record: StepRecord, permutation: tuple[int, ...]) -> bool:
        index = np.array(permutation)
        return self._mirror.is_safe(
            self._mirror.slots(record.request_ids)[index],
            record.num_computed_tokens[index],
            record.num_scheduled_tokens[index],
        )


class _ReferenceGuard:
    """The slow reference, on block tables of the step."""

    def __init__(self, header: TraceHeader) -> None:
        self._replay = Replay(header)
        self._step: Step

    def update(self, record: StepRecord) -> None:
        self._step = self._replay.step(record)

    def unsafe_cuts(self, record: StepRecord, cuts: CutRange) -> tuple[UnsafeCuts, ...]:
        return reference.unsafe_cuts(self._step, cuts)

    def order(self, record: StepRecord, phases: npt.NDArray[np.int8]) -> tuple[int, ...] | None:
        return reference.order(self._step, phases.tolist())

    def is_safe(self, record: StepRecord, permutation: tuple[int, ...]) -> bool:
        return not reference.unsafe_cuts(self._step.permuted(permutation))


@dataclass(frozen=True, slots=True)
class _Answer:
    feasible: CutRange
    unsafe: tuple[UnsafeCuts, ...]
    permutation: tuple[int, ...] | None
    seconds: float


def _eligible(record: StepRecord, options: AuditOptions) -> bool:
    """Whether vLLM would split the step."""
    scheduled = record.num_scheduled_tokens
    if len(scheduled) < 2:
        return False
    uniform_decode = bool((scheduled == 1).all())
    threshold = options.decode_token_threshold if uniform_decode else options.prefill_token_threshold
    return int(scheduled.sum()) >= threshold


def _answer(guard: _Guard, record: StepRecord, header: TraceHeader, policy: Policy) -> _Answer:
    """Ask the guard about every feasible cut and, where one is unsafe, for an order; only this is timed."""
    feasible = feasible_cuts(int(record.num_scheduled_tokens.sum()), header.num_ubatches)
    permutation = None
    began = time.perf_counter()
    unsafe = guard.unsafe_cuts(record, feasible)
    seconds = time.perf_counter() - began
    if unsafe and policy is Policy.REORDER:
        phases = decodes_lead(record, header.decode_threshold)
        began = time.perf_counter()
        permutation = guard.order(record, phases)
        seconds += time.perf_counter() - began
        if permutation is not None and not guard.is_safe(record, permutation):
            permutation = None
    return _Answer(feasible, unsafe, permutation, seconds)


def decodes_lead(record: StepRecord, decode_threshold: int | None) -> npt.NDArray[np.int8]:
    """The phases of a batch whose decodes must lead, as vLLM's ``split_decodes_and_prefills`` wants it.

    A decode is neither new nor resumed, has computed tokens and at most ``max(decode_threshold, 1)``
    scheduled ones. A short request that is none may stand among the prefills.

    Returns:
        int8, shape ``[num_reqs]``: ``Phase.DECODE`` or ``Phase.PREFILL``.
    """
    admitted = {entry.request_id for entry in (*record.new, *record.resumed)}
    known = np.array([request_id not in admitted for request_id in record.request_ids], dtype=np.bool_)
    decodes = (
        known
        & (record.num_computed_tokens > 0)
        & (record.num_scheduled_tokens <= max(decode_threshold or 0, 1))
    )
    return np.where(decodes, Phase.DECODE, Phase.PREFILL).astype(np.int8)


def _count(audit: TraceAudit, record: StepRecord, header: TraceHeader, answer: _Answer) -> None:
    cut = int(record.num_scheduled_tokens.sum()) // header.num_ubatches
    hazardous = any(
        index * cut in unsafe for index in range(1, header.num_ubatches) for unsafe in answer.unsafe
    )
    prefill = bool(record.num_scheduled_tokens.max() >= PREFILL_TOKENS)
    refused = not record.vllm_allows
    reordered = answer.permutation is not None
    kept = reordered or not answer.unsafe
    audit.eligible += 1
    audit.hazardous += hazardous
    audit.hazardous_any_cut += bool(answer.unsafe)
    audit.engine_vetoed += refused
    audit.engine_missed += hazardous and not refused
    audit.engine_needless += refused and not answer.unsafe
    audit.prefill_eligible += prefill
    audit.prefill_engine_vetoed += prefill and refused
    audit.kept += kept
    audit.vetoed += not kept
    audit.reordered += reordered
