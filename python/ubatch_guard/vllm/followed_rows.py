"""Who may read what is written in a step, and the block rows that tell: from vLLM's SchedulerOutput, by name.

A running request is given blocks of its own, and never one that another computes: only the scheduler's loop
over *waiting* requests looks for cached prefixes. So in a step that admits nobody, nobody reads what the step
writes, with one exception: after a failed KV load the scheduler sets running requests back, and lets them
count on each other to compute the lost blocks again (``_update_requests_with_invalid_blocks``).

What is scheduled is noted in every step and taken in only when somebody may read (or the list of notes grows
long).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ubatch_guard._core import Mirror
from ubatch_guard.kv_cache_groups import EngineGroups
from ubatch_guard.step import IntArray
from ubatch_guard.trace.records import Admission, Appended, BlockIds, Changes

_MAX_NOTED = 16
"""Steps that may wait to be taken in: few enough that taking them in does not stand out among the steps."""
_NOBODY: frozenset[str] = frozenset()
_NONE: list[str] = []
_NO_ROW = -1


class RowsLostError(RuntimeError):
    """The mirror cannot be relied on, and there is nothing to make it anew from."""


class AllRows:
    """The rows of all live requests in a mirror.

    Args:
        groups: The engine's KV cache groups.
        engine_rows: ``(request id, block ids per engine group)`` of all live requests as the engine itself
            has them when a step's batch is complete: to start from, and to start again from when the mirror
            cannot be relied on. None: there is no such source, and the guard has been there from the start.
        says_when_it_loads: An engine without ``kv_connector_metadata`` loads no KV. Otherwise it may.

    Attributes:
        mirror: As it was taken in last; see `take_in`.
        new: Requests that are new or resumed in the step under way.
        set_back: Running requests that compute again what a failed KV load has lost.
        loads_kv: The engine loads KV, so that a load can fail.
    """

    complete = True
    """Every request of a batch has a row."""

    def __init__(
        self,
        groups: EngineGroups,
        engine_rows: Callable[[], Iterable[tuple[str, BlockIds]]] | None = None,
        *,
        says_when_it_loads: bool = False,
    ) -> None:
        self.groups = groups
        self.mirror = Mirror(groups.groups)
        self.new: set[str] | frozenset[str] = _NOBODY
        self.set_back: dict[str, int] = {}
        """With the number of tokens that each had got to."""
        self._engine_rows = engine_rows
        self._noted: list[Any] = []
        self.loads_kv = False
        self._without = None if says_when_it_loads else self
        self._may_read: bool | None = None
        """In the step under way; None: not asked yet."""
        self._reached: dict[str, int] = {}
        """Where each request stood in its last step, in an engine that loads KV or does not say."""
        self._steady: tuple[list[str], IntArray] | None = None
        """The same of the last batch, not written back yet."""
        self._doubted = engine_rows is not None
        """The mirror is not what the engine has."""
        self._slots_of: Sequence[str] = _NONE
        self._slots = self.mirror.slots([])
        """Handles of ``_slots_of``: most steps have the requests of the step before."""

    def note(self, scheduler_output: Any) -> None:
        """Keep what the scheduler changed for later, and who is new."""
        cached = scheduler_output.scheduled_cached_reqs
        arriving = scheduler_output.scheduled_new_reqs
        resumed = getattr(cached, "resumed_req_ids", None)
        self.new = {request.req_id for request in arriving} if arriving else _NOBODY
        if resumed:
            self.new = self.new | resumed
        self._may_read = None
        if leaving := gone(scheduler_output):
            self._sync()
            for req_id in leaving:
                self._reached.pop(req_id, None)
                self.set_back.pop(req_id, None)
        self.loads_kv = getattr(scheduler_output, "kv_connector_metadata", self._without) is not None
        self._keep(scheduler_output)

    def changes(self, scheduler_output: Any) -> Changes:
        """What the scheduler changed, in the form of a trace; it holds references only."""
        cached, rows_of = scheduler_output.scheduled_cached_reqs, self.groups.rows
        finished = list(scheduler_output.finished_req_ids)
        resumed = getattr(cached, "resumed_req_ids", None) or _NOBODY
        each = list(zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True))
        appended = [(req_id, rows) for req_id, _, rows in each if rows is not None and req_id not in resumed]
        return Changes(
            finished=finished,
            preempted=[req_id for req_id in gone(scheduler_output) if req_id not in finished],
            new=[
                Admission(request.req_id, request.num_computed_tokens, rows_of(request.block_ids))
                for request in scheduler_output.scheduled_new_reqs
            ],
            resumed=[
                Admission(req_id, computed, rows_of(rows))
                for req_id, computed, rows in each
                if req_id in resumed
            ],
            appended=Appended([req_id for req_id, _ in appended], [rows_of(rows) for _, rows in appended]),
        )

    def may_read(
        self,
        req_ids: Sequence[str],
        num_computed_tokens: IntArray,
        prefilling: npt.NDArray[np.bool_] | None = None,
    ) -> bool:
        """Whether some request may read what is written in the step under way; looks once in a step.

        Args:
            req_ids: The batch.
            num_computed_tokens: int32 or int64, shape ``[num_reqs]``.
            prefilling: bool, shape ``[num_reqs]``: of these alone a request that is set back is one. Others
                may fall back for want of accepted drafts, where those are scheduled ahead. None: not known.
        """
        if self._may_read is None:
            if self.loads_kv or self.set_back:
                self._find_set_back(req_ids, num_computed_tokens, prefilling)
            self._may_read = bool(self.new or self.set_back)
        return self._may_read

    def take_in(self) -> None:
        """Bring the mirror up to date; called when the step's batch is complete.

        Raises:
            Exception: What was scheduled, or the engine's own rows, cannot be read. The mirror stays in doubt
                until it could be made anew.
        """
        if self._doubted:
            if self._engine_rows is None:
                raise RowsLostError("the engine has no rows to make the mirror anew from")
            self._start_again()
        elif self._noted:
            self._take_in()

    @property
    def restartable(self) -> bool:
        """It can do without having seen some steps."""
        return self._engine_rows is not None

    def doubt(self) -> None:
        """Make the mirror anew from the engine's rows before it is asked again."""
        self._doubted = True

    def slots(self, req_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """int32, shape ``[len(req_ids)]``: the mirror's handles, in batch order.

        Raises:
            UnknownRequestError: A request without a row.
        """
        if self._slots_of != req_ids:
            self._slots = self.mirror.slots(req_ids)
            self._slots_of = list(req_ids)
        return self._slots

    def _keep(self, scheduler_output: Any) -> None:
        if self._doubted and self._engine_rows is not None:
            # The engine's own rows will have it.
            return
        self._noted.append(scheduler_output)
        # Rows of new requests are V1's to extend from here on.
        if self.new or len(self._noted) > _MAX_NOTED:
            self._take_in()

    def _take_in(self) -> None:
        # Doubt first: an interrupt in the middle leaves rows that are neither the old ones nor the new.
        self._doubted = True
        noted, self._noted = self._noted, []
        for scheduler_output in noted:
            self._apply(scheduler_output)
        self._doubted = False

    def _start_again(self) -> None:
        assert self._engine_rows is not None
        self._noted.clear()
        self._slots_of = _NONE
        self.mirror.clear()
        for req_id, rows in self._engine_rows():
            self.mirror.add(req_id, self.groups.rows(rows))
        self._doubted = False

    def _apply(self, scheduler_output: Any) -> None:
        mirror, rows_of = self.mirror, self.groups.rows
        cached = scheduler_output.scheduled_cached_reqs
        for req_id in gone(scheduler_output):
            # A request can finish that was never scheduled, or whose row went when it was preempted.
            if req_id in mirror:
                # It may come again, in another slot.
                self._slots_of = _NONE
                mirror.free(req_id)
        for request in scheduler_output.scheduled_new_reqs:
            self._put(request.req_id, request.block_ids)
        resumed = getattr(cached, "resumed_req_ids", None)
        if resumed:
            for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if req_id in resumed:
                    self._put(req_id, block_ids)
                elif block_ids is not None:
                    mirror.append(req_id, rows_of(block_ids))
            return
        each = cached.new_block_ids
        if not self.groups.are_all:
            each = [None if block_ids is None else rows_of(block_ids) for block_ids in each]
        mirror.append_each(cached.req_ids, each)

    def _put(self, req_id: str, block_ids: BlockIds) -> None:
        # A streaming request comes as new again and again.
        put = self.mirror.replace if req_id in self.mirror else self.mirror.add
        put(req_id, self.groups.rows(block_ids))

    def _find_set_back(
        self,
        req_ids: Sequence[str],
        num_computed_tokens: IntArray,
        prefilling: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Find the running requests that are not past where they stood in their last step.

        After a failed load each affected request runs again: the first holder of a lost block from that block
        on, the others from where they stood, as if they had it. They may read what the first computes until
        all of them have caught up.
        """
        if self._steady is not None and not self.new and not self.set_back:
            before, stood = self._steady
            if before == req_ids and bool((num_computed_tokens > stood).all()):
                # By far the most steps: the same requests, all of which got on.
                stood[:] = num_computed_tokens
                return
        self._sync()
        reached = self._reached
        behind = False
        may_be = [True] * len(req_ids) if prefilling is None else prefilling.tolist()
        for req_id, computed, may in zip(req_ids, num_computed_tokens.tolist(), may_be, strict=True):
            if req_id in self.new:
                self.set_back.pop(req_id, None)
            elif may and computed <= (stood_at := reached.get(req_id, -1)):
                self.set_back[req_id] = max(self.set_back.get(req_id, 0), stood_at + 1)
            behind |= computed < self.set_back.get(req_id, 0)
        if self.set_back and not behind and self.set_back.keys() <= set(req_ids):
            self.set_back.clear()
        self._steady = (list(req_ids), num_computed_tokens.copy())

    def _sync(self) -> None:
        """Write back where the requests of the last steps stood."""
        if self._steady is not None:
            self._reached.update(zip(self._steady[0], self._steady[1].tolist(), strict=True))
            self._steady = None


class NewRows(AllRows):
    """The rows of requests that are being prefilled; of the others none.

    Enough where the others stand in front of them all: they read nothing of the step, and what they write is
    written first.

    Attributes:
        decode_query_len: Longest query of a running request that needs no row, where a request does not say
            how long its prefill is.
    """

    complete = False

    def __init__(self, groups: EngineGroups, decode_query_len: int) -> None:
        super().__init__(groups, says_when_it_loads=True)
        self.decode_query_len = decode_query_len
        self._prefill_len: dict[str, int | None] = {}
        """Of the requests with a row; None: not known."""
        self._through: list[str] = []
        """Those that the step that was taken in last both admits and prefills to the end: most."""

    def find(self, req_ids: Sequence[str], places: npt.NDArray[np.intp]) -> bool:
        """Have the rows of some requests at hand for `slots`, which takes the others to have none.

        Args:
            req_ids: The batch.
            places: Places in it, shape ``[some]``.

        Returns:
            Each of them has a row.
        """
        found = self.mirror.slots([req_ids[place] for place in places.tolist()], missing=True)
        self._slots = np.full(len(req_ids), _NO_ROW, np.int32)
        self._slots[places] = found
        self._slots_of = req_ids
        return bool(found.min(initial=0) > _NO_ROW)

    def slots(self, req_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """int32, shape ``[len(req_ids)]``: the mirror's handles, -1 for a request without a row."""
        if self._slots_of is not req_ids:
            return self.mirror.slots(req_ids, missing=True)
        return self._slots

    @property
    def restartable(self) -> bool:
        """As `AllRows.restartable`: requests that it has not seen coming are put in the scheduler's order."""
        return True

    def take_in(self) -> None:
        """As `AllRows.take_in`; without a row for a request that was there before the guard."""
        if self._doubted:
            self._clear()
            self._noted = self._noted[-1:]
            self._doubted = False
        if self._noted:
            self._take_in()

    def _keep(self, scheduler_output: Any) -> None:
        self._slots_of = _NONE
        if self._through:
            if len(self._through) == len(self._prefill_len):
                self._clear()
            else:
                for req_id in self._through:
                    self._drop(req_id)
                self._through = []
        if self._prefill_len or self._noted or self.new:
            if len(self._noted) > _MAX_NOTED:
                self._take_in()
            # Not this step: if it is too small to be cut, nobody looks.
            self._noted.append(scheduler_output)

    def _apply(self, scheduler_output: Any) -> None:
        rows, rows_of, mirror = self._prefill_len, self.groups.rows, self.mirror
        self._through = through = []
        counts, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", None) or _NOBODY
        for req_id in gone(scheduler_output):
            self._drop(req_id)
        if rows or resumed:
            for req_id, num_computed_tokens, block_ids in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            ):
                if req_id in resumed:
                    self._put(req_id, block_ids)
                    rows[req_id] = None
                elif req_id in rows:
                    length = rows[req_id]
                    if length is None and counts[req_id] <= self.decode_query_len:
                        length = 0
                    if length is not None and num_computed_tokens >= length:
                        self._drop(req_id)
                    elif block_ids is not None:
                        mirror.append(req_id, rows_of(block_ids))
        for request in scheduler_output.scheduled_new_reqs:
            req_id = request.req_id
            put = mirror.replace if req_id in rows else mirror.add
            put(req_id, rows_of(request.block_ids))
            tokens = getattr(request, "prefill_token_ids", None)
            rows[req_id] = length = None if tokens is None else len(tokens)
            if length is not None and request.num_computed_tokens + counts[req_id] >= length:
                through.append(req_id)

    def _drop(self, req_id: str) -> None:
        if req_id in self._prefill_len:
            del self._prefill_len[req_id]
            self.mirror.free(req_id)

    def _clear(self) -> None:
        self.mirror.clear()
        self._prefill_len.clear()
        self._through = []


def gone(scheduler_output: Any) -> list[str]:
    """The requests that finished or were preempted since the last step, each once."""
    finished = scheduler_output.finished_req_ids
    preempted = getattr(scheduler_output, "preempted_req_ids", None)
    if not finished and not preempted:
        return []
    return [*finished, *(req_id for req_id in preempted or () if req_id not in finished)]
