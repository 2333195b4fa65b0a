"""What a picture of an audit shows, gathered step by step in bounded memory. It does not draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ubatch_guard import reference
from ubatch_guard.step import CutRange, Reason, UnsafeCuts, Verdict
from ubatch_guard.trace.audit import AuditedStep
from ubatch_guard.trace.replay import Replay, TooWideError

MAX_BINS = 2000
"""Most bins of a time line; a longer trace gets wider ones."""
MAX_OPENED = 24
"""Most steps of a kind that are opened, unless told otherwise."""
MAX_CULPRITS = 100_000
"""Most requests that are counted; beyond that, those counted least are forgotten."""

KINDS = ("small", "split", "reordered", "whole")
"""What becomes of a step with the guard: too small to be cut, cut as it is, cut in another order, not cut."""


@dataclass(slots=True)
class TimeLine:
    """Scheduled tokens of the steps, in bins of ``width`` steps.

    Attributes:
        width: Steps of a bin, a power of two.
        tokens: A row per bin: tokens by kind, as `KINDS` has them.
        unsafe: Per bin, tokens of the steps that are unsafe at the engine's own cut.
        steps: Steps so far.
    """

    width: int = 1
    tokens: list[list[int]] = field(default_factory=list)
    unsafe: list[int] = field(default_factory=list)
    steps: int = 0

    def add(self, kind: int, tokens: int, *, unsafe: bool) -> None:
        """Count a step."""
        if self.steps == self.width * MAX_BINS:
            self._double()
        if self.steps % self.width == 0:
            self.tokens.append([0] * len(KINDS))
            self.unsafe.append(0)
        self.steps += 1
        self.tokens[-1][kind] += tokens
        self.unsafe[-1] += tokens * unsafe

    def _double(self) -> None:
        self.width *= 2
        pairs = zip(self.tokens[::2], self.tokens[1::2], strict=True)
        self.tokens = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        self.unsafe = [a + b for a, b in zip(self.unsafe[::2], self.unsafe[1::2], strict=True)]


@dataclass(frozen=True, slots=True)
class Bar:
    """A request in a step.

    Attributes:
        request_id: Its id.
        position: Place in the batch as it was scheduled.
        first: Token offset of its first scheduled token.
        num_scheduled_tokens: Its tokens in this step.
        num_computed_tokens: Its tokens before this step.
    """

    request_id: str
    position: int
    first: int
    num_scheduled_tokens: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Read:
    """One request reads what another one writes in the same step.

    Attributes:
        reader: Index of the reader among the bars.
        writer: Index of the writer.
        unsafe: The cuts that are unsafe because of the two; empty where the writer comes first.
    """

    reader: int
    writer: int
    unsafe: CutRange


@dataclass(frozen=True, slots=True)
class Batch:
    """A step in one order.

    Attributes:
        bars: Its requests in that order.
        reads: Who reads whose blocks; None: not known, the rows are too long.
    """

    bars: Sequence[Bar]
    reads: Sequence[Read] | None


@dataclass(frozen=True, slots=True)
class OpenedStep:
    """A step with an unsafe cut, in full.

    Attributes:
        line: Line of the trace.
        number: Number of the step, from 1.
        num_tokens: Scheduled tokens.
        cuts: Where the engine cuts it.
        feasible: Where padding for other ranks can move the cut.
        unsafe: The unsafe cuts among these.
        reason: What the guard says.
        before: As it was scheduled.
        after: In the guard's order; None: it runs whole.
    """

    line: int
    number: int
    num_tokens: int
    cuts: Sequence[int]
    feasible: CutRange
    unsafe: Sequence[UnsafeCuts]
    reason: Reason
    before: Batch
    after: Batch | None


class _Spread:
    """Keeps some of many, spread evenly: every k-th, with k doubled whenever there are too many."""

    def __init__(self, most: int) -> None:
        self.kept: list[OpenedStep] = []
        self._most = most
        self._every = 1
        self._seen = 0

    def wants_next(self) -> bool:
        wanted = self._seen % self._every == 0
        self._seen += 1
        return wanted

    def keep(self, step: OpenedStep) -> None:
        self.kept.append(step)
        if len(self.kept) > self._most:
            # An odd number: the first, and every k-th after it up to the last. So they stay after halving.
            self.kept = self.kept[::2]
            self._every *= 2


class TracePicture:
    """What there is to be seen of one trace.

    Args:
        most_opened: Most steps of a kind that are opened, an even number; spread over all of their kind.

    Attributes:
        time_line: All steps.
        unsafe_tokens: Tokens of the steps that are unsafe at the engine's own cut.
        missed_tokens: Those of them in steps that vLLM's old rule lets through.
        readers: By request, the unsafe steps in which it is the culprit that reads.
        writers: The same for the culprit that writes.
    """

    def __init__(self, most_opened: int = MAX_OPENED) -> None:
        self.time_line = TimeLine()
        self.unsafe_tokens = 0
        self.missed_tokens = 0
        self.readers: Counter[str] = Counter()
        self.writers: Counter[str] = Counter()
        self._replay: Replay | None = None
        self._opened = {True: _Spread(most_opened), False: _Spread(most_opened)}

    @property
    def opened(self) -> list[OpenedStep]:
        """Some steps with an unsafe cut, ascending: some that are reordered and some that run whole."""
        kept = [step for spread in self._opened.values() for step in spread.kept]
        return sorted(kept, key=lambda step: step.number)

    def add(self, step: AuditedStep) -> None:
        """Take in a step, which follows on the ones before.

        Raises:
            MemoryError: There is no memory for the rows.
        """
        if self._replay is None:
            self._replay = Replay(step.header)
        self._replay.apply(step.record)
        verdict = step.verdict
        tokens = step.record.num_tokens
        self.time_line.add(kind_of(verdict), tokens, unsafe=step.hazardous)
        self.unsafe_tokens += tokens * step.hazardous
        self.missed_tokens += tokens * (step.hazardous and step.record.vllm_allows)
        if verdict is None or not verdict.unsafe:
            return
        ids = step.record.request_ids
        _count(self.readers, {ids[cuts.reader] for cuts in verdict.unsafe})
        _count(self.writers, {ids[cuts.writer] for cuts in verdict.unsafe})
        spread = self._opened[verdict.allow]
        if spread.wants_next():
            spread.keep(self._open(step, verdict, self._replay))

    def _open(self, step: AuditedStep, verdict: Verdict, replay: Replay) -> OpenedStep:
        order = verdict.order
        return OpenedStep(
            line=step.line,
            number=self.time_line.steps,
            num_tokens=step.record.num_tokens,
            cuts=step.cuts,
            feasible=step.feasible,
            unsafe=verdict.unsafe,
            reason=verdict.reason,
            before=_batch(step, replay, range(len(step.record.request_ids))),
            after=None if order is None else _batch(step, replay, order.permutation),
        )


def microbatches(cuts: Sequence[int], num_tokens: int) -> Iterator[tuple[int, int]]:
    """The token offsets ``first, end`` of each microbatch."""
    return pairwise([0, *cuts, num_tokens])


def kind_of(verdict: Verdict | None) -> int:
    """What becomes of a step, an index of `KINDS`."""
    if verdict is None:
        return KINDS.index("small")
    if not verdict.allow:
        return KINDS.index("whole")
    return KINDS.index("split" if verdict.order is None else "reordered")


def _count(counts: Counter[str], ids: set[str]) -> None:
    counts.update(ids)
    if len(counts) > MAX_CULPRITS:
        kept = counts.most_common(MAX_CULPRITS // 2)
        counts.clear()
        counts.update(dict(kept))


def _batch(step: AuditedStep, replay: Replay, permutation: Sequence[int]) -> Batch:
    record = step.record
    bars = []
    first = 0
    for position in permutation:
        scheduled = int(record.num_scheduled_tokens[position])
        computed = int(record.num_computed_tokens[position])
        bars.append(Bar(record.request_ids[position], position, first, scheduled, computed))
        first += scheduled
    try:
        last = reference.last_writes(replay.step_of(record).permuted(permutation))
    except TooWideError:
        return Batch(bars, None)
    reads = [
        Read(reader, writer, CutRange(bars[reader].first + 1, offset))
        for (reader, writer), offset in sorted(last.items())
    ]
    return Batch(bars, reads)
