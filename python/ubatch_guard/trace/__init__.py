"""Step traces: what an engine ran, step by step, to be recorded, read and audited."""

from ubatch_guard.trace.format import (
    Admission,
    Growth,
    StepRecord,
    TraceError,
    TraceHeader,
    TraceReader,
    TraceWriter,
)
from ubatch_guard.trace.recorder import StepRecorder
from ubatch_guard.trace.replay import Replay

__all__ = [
    "Admission",
    "Growth",
    "Replay",
    "StepRecord",
    "StepRecorder",
    "TraceError",
    "TraceHeader",
    "TraceReader",
    "TraceWriter",
]
