"""The block tables of a trace, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ubatch_guard.step import Step
from ubatch_guard.trace.format import TraceHeader
from ubatch_guard.trace.records import BlockIds, StepRecord, apply_changes

MAX_TABLE_ENTRIES = 1 << 26
"""Entries of a step's block tables, which are as wide as its longest row."""


class TooWideError(ValueError):
    """A step whose block tables would have more than ``MAX_TABLE_ENTRIES`` entries."""


class PlainRows:
    """Rows of the live requests, the slow and plain counterpart of the mirror."""

    def __init__(self) -> None:
        self._rows: dict[str, list[npt.NDArray[np.int32]]] = {}

    def __contains__(self, request_id: object, /) -> bool:
        return request_id in self._rows

    def __getitem__(self, request_id: str) -> list[npt.NDArray[np.int32]]:
        return self._rows[request_id]

    def add(self, request_id: str, rows: BlockIds) -> None:
        """A request with one row per group."""
        self._rows[request_id] = [np.asarray(row, dtype=np.int32) for row in rows]

    replace = add

    def append_each(self, request_ids: Sequence[str], rows: Sequence[BlockIds | None]) -> None:
        """Add blocks to the ends of rows."""
        for request_id, added in zip(request_ids, rows, strict=True):
            if added is not None:
                self._rows[request_id] = [
                    np.concatenate((row, np.asarray(more, dtype=np.int32)))
                    for row, more in zip(self._rows[request_id], added, strict=True)
                ]

    def free(self, request_id: str) -> None:
        """The request's rows go."""
        del self._rows[request_id]


class Replay:
    """Keeps the rows of the live requests and gives each step with block tables of its own.

    For the reference and for tests.
    """

    def __init__(self, header: TraceHeader) -> None:
        self.groups = header.groups
        self._rows = PlainRows()

    def step(self, record: StepRecord) -> Step:
        """Apply a record that a :class:`~ubatch_guard.trace.reader.TraceReader` gave, in its order.

        Returns:
            The step, as `step_of` gives it.

        Raises:
            TooWideError: See there.
        """
        self.apply(record)
        return self.step_of(record)

    def apply(self, record: StepRecord) -> None:
        """Take over what became of the rows before a step; records come in their order."""
        apply_changes(self._rows, record.changes)

    def step_of(self, record: StepRecord) -> Step:
        """The record applied last as a step.

        Returns:
            The step; its block tables are int32, as wide as the longest row and zero past each row's end.

        Raises:
            TooWideError: See there.
        """
        rows_of_batch = [self._rows[request_id] for request_id in record.request_ids]
        widths = [
            max((len(rows[group]) for rows in rows_of_batch), default=0) for group in range(len(self.groups))
        ]
        if len(rows_of_batch) * sum(widths) > MAX_TABLE_ENTRIES:
            raise TooWideError(
                f"block tables of {len(rows_of_batch)} rows and {sum(widths)} columns have more than "
                f"{MAX_TABLE_ENTRIES} entries; the core needs no tables"
            )
        tables = []
        for group, width in enumerate(widths):
            table = np.zeros((len(rows_of_batch), width), dtype=np.int32)
            for position, rows in enumerate(rows_of_batch):
                table[position, : len(rows[group])] = rows[group]
            tables.append(table)
        return Step(
            num_computed_tokens=record.num_computed_tokens,
            num_scheduled_tokens=record.num_scheduled_tokens,
            block_tables=tuple(tables),
            groups=self.groups,
        )
