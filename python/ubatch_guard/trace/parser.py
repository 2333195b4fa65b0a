"""The steps of a trace out of its lines, each checked against the steps before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ubatch_guard.trace.format import (
    INT32_MAX,
    MAX_ROW_ENTRIES,
    MalformedError,
    TraceHeader,
    check_int,
    get,
    short,
)
from ubatch_guard.trace.records import Admission, Appended, Changes, StepRecord

_Rows = tuple[npt.NDArray[np.int32], ...]


class StepParser:
    """Turns step lines into records; keeps how long each live request's rows are.

    Args:
        header: The trace's header.
    """

    def __init__(self, header: TraceHeader) -> None:
        self._header = header
        self._num_groups = len(header.block_sizes)
        self._block_sizes = np.array(header.block_sizes, dtype=np.int64)
        # Columns of each live request's rows, per group, and their sum over requests and groups.
        self._columns: dict[str, list[int]] = {}
        self._num_entries = 0
        self._preempted: set[str] = set()

    def parse(self, line: dict[str, Any]) -> StepRecord:
        """The record of a step line.

        Raises:
            MalformedError: The line is not as the format says, or does not fit the lines before.
        """
        finished = self._ids(line, "finished")
        preempted = self._ids(line, "preempted")
        for request_id in preempted:
            self._leave("preempted", request_id)
            self._preempted.add(request_id)
        for request_id in finished:
            # A preempted request has no row any more and can finish all the same, even at once.
            if request_id in self._preempted:
                self._preempted.discard(request_id)
            else:
                self._leave("finished", request_id)
        new = self._admissions(line, "new")
        resumed = self._admissions(line, "resumed")
        appended = self._appended(get(line, "appended", list))
        request_ids, computed, scheduled = self._batch(get(line, "batch", list))
        record = StepRecord(
            Changes(finished, preempted, new, resumed, appended),
            request_ids,
            computed,
            scheduled,
            get(line, "vllm_allows", bool),
        )
        if self._header.version > 1:
            self._add_outcome(record, line)
        return record

    def _add_outcome(self, record: StepRecord, line: dict[str, Any]) -> None:
        """What only version 2 can say."""
        if "set_back" in line:
            record.changes.set_back = self._ids(line, "set_back")
            for request_id in record.changes.set_back:
                if request_id not in self._columns:
                    raise MalformedError(f"set_back: unknown id {short(request_id)}")
        if line.get("cuts") is not None:
            cuts = get(line, "cuts", list)
            before = 0
            for cut in cuts:
                before = check_int("cuts", cut, before + 1)
            if len(cuts) >= self._header.num_ubatches:
                raise MalformedError(f"cuts: {len(cuts)} for {self._header.num_ubatches} microbatches")
            record.cuts = tuple(cuts)
        if line.get("ranks_agreed") is not None:
            record.ranks_agreed = get(line, "ranks_agreed", bool)

    def _ids(self, line: dict[str, Any], key: str) -> tuple[str, ...]:
        ids = get(line, key, list)
        if not set(map(type, ids)) <= {str}:
            raise MalformedError(f"{key}: request ids are strings")
        return tuple(ids)

    def _leave(self, key: str, request_id: str) -> None:
        columns = self._columns.pop(request_id, None)
        if columns is None:
            raise MalformedError(f"{key}: unknown id {short(request_id)}")
        self._num_entries -= sum(columns)

    def _admissions(self, line: dict[str, Any], key: str) -> tuple[Admission, ...]:
        entries = get(line, key, list)
        admissions = tuple(self._admission(entry, key) for entry in entries)
        duplicate = first_duplicate(entry.request_id for entry in admissions)
        if duplicate is not None:
            raise MalformedError(f"{key}: duplicate id {short(duplicate)}")
        return admissions

    def _admission(self, entry: Any, key: str) -> Admission:
        if type(entry) is not list or len(entry) != 3 or type(entry[0]) is not str:
            raise MalformedError(f"{key}: {short(entry)} is not [id, num_computed_tokens, rows]")
        request_id, computed, rows = entry
        live = request_id in self._columns
        if key == "new" and live and self._header.version == 1:
            raise MalformedError(f"new: duplicate id {short(request_id)}")
        if key == "resumed" and not live and request_id not in self._preempted:
            raise MalformedError(f"resumed: unknown id {short(request_id)}")
        if not request_id.isascii():
            _check_encodable(key, request_id)
        checked = self._rows(key, rows)
        if live:
            self._leave(key, request_id)
        self._preempted.discard(request_id)
        self._columns[request_id] = [0] * self._num_groups
        self._grow(key, request_id, checked)
        return Admission(request_id, check_int(key, computed, 0), checked)

    def _appended(self, entries: list[Any]) -> Appended:
        ids, added = [], []
        for entry in entries:
            if type(entry) is not list or len(entry) != 2 or type(entry[0]) is not str:
                raise MalformedError(f"appended: {short(entry)} is not [id, rows]")
            request_id, rows = entry
            if request_id not in self._columns:
                raise MalformedError(f"appended: unknown id {short(request_id)}")
            checked = self._rows("appended", rows)
            self._grow("appended", request_id, checked)
            ids.append(request_id)
            added.append(checked)
        return Appended(tuple(ids), tuple(added))

    def _grow(self, key: str, request_id: str, rows: _Rows) -> None:
        columns = self._columns[request_id]
        for group, row in enumerate(rows):
            columns[group] += len(row)
            self._num_entries += len(row)
        if self._num_entries > MAX_ROW_ENTRIES:
            raise MalformedError(f"{key}: more than {MAX_ROW_ENTRIES} block ids in the rows of all requests")

    def _rows(self, key: str, rows: Any) -> _Rows:
        if type(rows) is not list or not set(map(type, rows)) <= {list}:
            raise MalformedError(f"{key}: rows {short(rows)} are not one list of block ids a group")
        if len(rows) != self._num_groups:
            raise MalformedError(f"{key}: {len(rows)} lists for {self._num_groups} groups")
        last = self._header.num_blocks - 1
        return tuple(_int32(key, "block ids", ids, last) for ids in rows)

    def _batch(
        self, entries: list[Any]
    ) -> tuple[tuple[str, ...], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        if not (set(map(type, entries)) <= {list} and set(map(len, entries)) <= {3}):
            raise MalformedError("batch: an entry is not [id, num_computed_tokens, num_scheduled_tokens]")
        request_ids: tuple[str, ...]
        request_ids, computed, scheduled = zip(*entries, strict=True) if entries else ((), (), ())
        if not set(map(type, request_ids)) <= {str}:
            raise MalformedError("batch: request ids are strings")
        unique = set(request_ids)
        if len(unique) != len(request_ids):
            raise MalformedError(f"batch: duplicate id {short(first_duplicate(request_ids))}")
        if not unique <= self._columns.keys():
            unknown = next(request_id for request_id in request_ids if request_id not in self._columns)
            raise MalformedError(f"batch: unknown id {short(unknown)}")
        num_computed = _int32("batch", "num_computed_tokens", computed, INT32_MAX)
        num_scheduled = _int32("batch", "num_scheduled_tokens", scheduled, INT32_MAX)
        total = int(num_scheduled.sum(dtype=np.int64))
        if total > INT32_MAX:
            raise MalformedError(f"batch: {total} scheduled tokens, more than {INT32_MAX}")
        self._check_rows(request_ids, num_computed.astype(np.int64) + num_scheduled)
        return request_ids, num_computed, num_scheduled

    def _check_rows(self, request_ids: tuple[str, ...], num_tokens: npt.NDArray[np.int64]) -> None:
        """Check that every request's rows have a column for each of its tokens."""
        columns = np.array([self._columns[request_id] for request_id in request_ids], dtype=np.int64)
        columns = columns.reshape(len(request_ids), self._num_groups)
        short_of = columns * self._block_sizes < num_tokens[:, None]
        if short_of.any():
            position, group = np.argwhere(short_of)[0].tolist()
            raise MalformedError(
                f"batch: the row of {short(request_ids[position])} in group {group} has "
                f"{columns[position, group]} columns, too few for {num_tokens[position]} tokens"
            )


def first_duplicate(values: Iterable[str]) -> str | None:
    """The first value that was there before, or None."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def _check_encodable(key: str, request_id: str) -> None:
    """JSON can escape half a surrogate pair, which no output can show."""
    try:
        request_id.encode()
    except UnicodeEncodeError as error:
        raise MalformedError(f"{key}: id {short(request_id)} is not Unicode text") from error


def _int32(key: str, what: str, values: Sequence[Any], most: int) -> npt.NDArray[np.int32]:
    # A trace is mostly such lists, so they are checked whole and not number by number.
    if not set(map(type, values)) <= {int} or (values and not (min(values) >= 0 and max(values) <= most)):
        wrong = next(value for value in values if type(value) is not int or not 0 <= value <= most)
        raise MalformedError(f"{key}: {what}: {short(wrong)} is not an integer in 0..{most}")
    return np.array(values, dtype=np.int32)
