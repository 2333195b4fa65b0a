"""The block tables of a trace, step by step."""

from __future__ import annotations

import numpy as np

from ubatch_guard.step import Step
from ubatch_guard.trace.format import Rows, StepRecord, TraceHeader


class Replay:
    """Keeps the rows of the live requests and gives each step with block tables of its own.

    The slow and plain counterpart of the mirror, for the reference and for tests.
    """

    def __init__(self, header: TraceHeader) -> None:
        self.groups = header.groups
        self._rows: dict[str, Rows] = {}

    def step(self, record: StepRecord) -> Step:
        """Apply a record that a :class:`~ubatch_guard.trace.format.TraceReader` gave, in its order.

        Returns:
            The step; its block tables are int32, as wide as the longest row and zero past each row's end.
        """
        for request_id in (*record.finished, *record.preempted):
            self._rows.pop(request_id, None)
        for entry in (*record.new, *record.resumed):
            self._rows[entry.request_id] = entry.rows
        for growth in record.appended:
            rows = self._rows[growth.request_id]
            self._rows[growth.request_id] = tuple(
                np.concatenate(pair) for pair in zip(rows, growth.rows, strict=True)
            )
        tables = []
        for group in range(len(self.groups)):
            rows_of_group = [self._rows[request_id][group] for request_id in record.request_ids]
            width = max((len(row) for row in rows_of_group), default=0)
            table = np.zeros((len(rows_of_group), width), dtype=np.int32)
            for position, row in enumerate(rows_of_group):
                table[position, : len(row)] = row
            tables.append(table)
        return Step(
            num_computed_tokens=record.num_computed_tokens,
            num_scheduled_tokens=record.num_scheduled_tokens,
            block_tables=tuple(tables),
            groups=self.groups,
        )
