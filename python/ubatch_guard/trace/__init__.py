"""Step traces: what an engine ran, step by step, to be recorded, read and audited."""

from ubatch_guard.trace.format import TraceError, TraceHeader
from ubatch_guard.trace.reader import TraceReader
from ubatch_guard.trace.recorder import StepRecorder
from ubatch_guard.trace.records import Admission, Appended, Changes, StepRecord, apply_changes
from ubatch_guard.trace.replay import Replay
from ubatch_guard.trace.writer import TraceWriter

__all__ = [
    "Admission",
    "Appended",
    "Changes",
    "Replay",
    "StepRecord",
    "StepRecorder",
    "TraceError",
    "TraceHeader",
    "TraceReader",
    "TraceWriter",
    "apply_changes",
]
