"""A step as traces and runners hold it: what became of the rows before it, the batch, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ubatch_guard.step import IntArray

BlockIds = Sequence[Sequence[int] | IntArray]
"""Block ids per KV cache group, as engines hand them over."""


@dataclass(slots=True, eq=False)
class Admission:
    """A request that gets whole new rows, with the tokens it starts from."""

    request_id: str
    num_computed_tokens: int
    rows: BlockIds


@dataclass(slots=True, eq=False)
class Appended:
    """Blocks added to the ends of rows, in the form of vLLM's ``CachedRequestData``.

    Attributes:
        request_ids: Requests that have rows.
        rows: Of each, the block ids added; None: none.
    """

    request_ids: Sequence[str] = ()
    rows: Sequence[BlockIds | None] = ()


@dataclass(slots=True, eq=False)
class Changes:
    """What became of the rows before a step. Holds references only; they apply in this order.

    Attributes:
        finished: Ids whose rows go.
        preempted: Ids whose rows go, to come back in ``resumed`` or ``new``.
        new: Requests that the engine sees for the first time, or, in a streaming session, again with other
            rows.
        resumed: Requests that come back after a preemption.
        appended: Blocks added to rows.
        set_back: Running requests that a failed KV load has set back: they may read what another request of
            the step writes again.
    """

    finished: Sequence[str] = ()
    preempted: Sequence[str] = ()
    new: Sequence[Admission] = ()
    resumed: Sequence[Admission] = ()
    appended: Appended = field(default_factory=Appended)
    set_back: Sequence[str] = ()

    def may_read(self, request_ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """bool, shape ``[len(request_ids)]``: who may read what another request writes in the same step."""
        ids = {entry.request_id for entry in (*self.new, *self.resumed)}
        ids.update(self.set_back)
        if not ids:
            return np.zeros(len(request_ids), dtype=np.bool_)
        return np.fromiter((request_id in ids for request_id in request_ids), np.bool_, len(request_ids))


@dataclass(slots=True, eq=False)
class StepRecord:
    """One step: what became of the rows before it, the batch, and what came of it.

    Attributes:
        changes: What became of the rows.
        request_ids: The batch, in the order in which it ran.
        num_computed_tokens: int32 or int64, shape ``[num_reqs]``.
        num_scheduled_tokens: int32 or int64, shape ``[num_reqs]``.
        vllm_allows: What vLLM's own guard answered; True where it was not asked.
        cuts: The cuts really made, ascending token offsets; empty: the step ran whole; None: not known.
        ranks_agreed: Whether every data-parallel rank voted to split the step; None: not known.
    """

    changes: Changes
    request_ids: Sequence[str]
    num_computed_tokens: IntArray
    num_scheduled_tokens: IntArray
    vllm_allows: bool = True
    cuts: Sequence[int] | None = None
    ranks_agreed: bool | None = None

    @property
    def num_tokens(self) -> int:
        """Scheduled tokens of the whole step."""
        return int(self.num_scheduled_tokens.sum())

    def copied(self) -> StepRecord:
        """The same in lists and arrays of its own: engines extend theirs in place later on."""
        changes = self.changes
        return StepRecord(
            Changes(
                finished=list(changes.finished),
                preempted=list(changes.preempted),
                new=_copied_admissions(changes.new),
                resumed=_copied_admissions(changes.resumed),
                appended=Appended(
                    list(changes.appended.request_ids),
                    [None if rows is None else _copied_rows(rows) for rows in changes.appended.rows],
                ),
                set_back=list(changes.set_back),
            ),
            list(self.request_ids),
            self.num_computed_tokens.copy(),
            self.num_scheduled_tokens.copy(),
            bool(self.vllm_allows),
            None if self.cuts is None else [int(cut) for cut in self.cuts],
            None if self.ranks_agreed is None else bool(self.ranks_agreed),
        )


class RowStore(Protocol):
    """What keeps rows by changes: the core's ``Mirror``, and `ubatch_guard.trace.replay.PlainRows`."""

    def __contains__(self, request_id: object, /) -> bool: ...

    def add(self, request_id: str, rows: BlockIds) -> None:
        """A new request with one row per group."""

    def replace(self, request_id: str, rows: BlockIds) -> None:
        """Give a known request new rows."""

    def append_each(self, request_ids: Sequence[str], rows: Sequence[BlockIds | None]) -> None:
        """Add blocks to the ends of rows."""

    def free(self, request_id: str) -> None:
        """The request's rows go."""


def apply_changes(store: RowStore, changes: Changes) -> None:
    """Bring rows up to date.

    A request can finish that has no row: it was never scheduled, or its row went when it was preempted. One
    that comes as new or resumed while it has rows gets other ones.

    Raises:
        GuardError: What the store refuses.
    """
    for request_id in (*changes.finished, *changes.preempted):
        if request_id in store:
            store.free(request_id)
    for entry in (*changes.new, *changes.resumed):
        put = store.replace if entry.request_id in store else store.add
        put(entry.request_id, entry.rows)
    store.append_each(changes.appended.request_ids, changes.appended.rows)


def _copied_admissions(entries: Sequence[Admission]) -> list[Admission]:
    return [
        Admission(entry.request_id, entry.num_computed_tokens, _copied_rows(entry.rows)) for entry in entries
    ]


def _copied_rows(rows: BlockIds) -> list[Sequence[int] | IntArray]:
    return [row.copy() if isinstance(row, np.ndarray) else list(row) for row in rows]
