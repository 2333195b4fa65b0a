"""The recorder: what it writes can be read, whatever ends it, and it never holds up or fails a step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ubatch_guard.trace import StepRecord, StepRecorder, TraceHeader, TraceReader

HEADER = TraceHeader((4,), (None,), 1000, 1)
ROWS = [[1, 2, 3]]


def _read(path: Path, *, partial: bool = False) -> list[StepRecord]:
    with TraceReader(path, partial=partial) as trace:
        return list(trace)


def _first(recorder: StepRecorder) -> None:
    recorder.record([], [], [("a", 0, ROWS)], [], [], [("a", 0, 4)], True)


def _further(recorder: StepRecorder) -> None:
    recorder.record([], [], [], [], [], [("a", 4, 1)], True)


def test_what_is_recorded_can_be_read(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    recorder.record((), set(), [("a", 0, [np.array([1, 2], dtype=np.int64)])], [], [], [("a", 0, 8)], True)
    recorder.record(
        [],
        [],
        [],
        [],
        [("a", ([3],))],
        zip(["a"], np.array([8], dtype=np.int32), np.array([1], dtype=np.int32), strict=True),
        np.False_,
    )
    recorder.record([], ["a"], [], [], [], [], True)
    recorder.record([], [], [], [("a", 4, [[5, 6]])], [], [("a", 4, 2)], True)
    recorder.record(["a"], [], [], [], [], [], True)
    recorder.close()
    assert (recorder.recorded, recorder.dropped) == (5, 0)
    first, second, third, fourth, fifth = _read(recorder.path)
    assert first.new[0].rows[0].tolist() == [1, 2]
    assert second.appended[0].rows[0].tolist() == [3]
    assert (second.num_computed_tokens.tolist(), second.num_scheduled_tokens.tolist()) == ([8], [1])
    assert (first.vllm_allows, second.vllm_allows) == (True, False)
    assert third.preempted == ("a",)
    assert (fourth.resumed[0].num_computed_tokens, fourth.resumed[0].rows[0].tolist()) == (4, [5, 6])
    assert fifth.finished == ("a",)


def test_block_lists_may_change_after_the_step(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    row = [1, 2]
    for _ in range(50):
        recorder.record([], [], [], [], [], [], True)
    recorder.record([], [], [("a", 0, [row])], [], [], [("a", 0, 8)], True)
    row.append(999_999)
    recorder.close()
    assert _read(recorder.path)[-1].new[0].rows[0].tolist() == [1, 2]


def test_the_file_never_passes_its_bound(tmp_path: Path) -> None:
    bound = 2000
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER, max_bytes=bound)
    _first(recorder)
    for _ in range(500):
        _further(recorder)
    recorder.close()
    records = _read(recorder.path)
    assert 1 < len(records) == recorder.recorded
    assert recorder.recorded + recorder.dropped == 501
    assert bound - 200 < recorder.path.stat().st_size <= bound
    assert recorder.ended is not None
    assert str(bound) in recorder.ended


def test_a_bound_below_the_header_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="header"):
        StepRecorder(tmp_path / "t.jsonl", HEADER, max_bytes=10)
    assert not (tmp_path / "t.jsonl").exists()


def test_a_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        StepRecorder(tmp_path / "nowhere" / "t.jsonl", HEADER)


@pytest.mark.parametrize(
    "arguments",
    [
        (None, [], [], [], [], [], True),
        ([], [], [("a",)], [], [], [], True),
        ([], [], [], [], [], [("a", object(), 1)], True),
        ([], [], [], [], [], [("a", 2**3000, {1})], True),
    ],
)
def test_a_step_that_cannot_be_recorded_does_not_fail(arguments: Any, tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    _first(recorder)
    recorder.record(*arguments)
    _further(recorder)
    recorder.close()
    # The trace ends before the step, for one with a hole could not be replayed.
    assert recorder.recorded == len(_read(recorder.path)) == 1
    assert recorder.dropped == 2
    assert recorder.ended not in (None, "closed")


def test_recording_after_the_close_does_not_fail(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    _first(recorder)
    recorder.close()
    recorder.close()
    _further(recorder)
    assert (recorder.recorded, recorder.dropped, recorder.ended) == (1, 1, "closed")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_does_not_fail_a_step(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._file)
    os.close(full)
    _first(recorder)
    recorder.close()
    assert (recorder.recorded, recorder.dropped) == (0, 1)
    assert recorder.ended is not None
    assert "space" in recorder.ended


@pytest.mark.timeout(60)
def test_a_writer_that_hangs_does_not_hold_up_a_step(tmp_path: Path) -> None:
    """A pipe that nobody reads stands for a disk that does not answer: a step that waits never ends."""
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    reading, writing = os.pipe()
    os.dup2(writing, recorder._file)
    os.close(writing)
    wide = [("a", 0, [list(range(100_000))])]
    for _ in range(1500):
        recorder.record([], [], wide[:0] if recorder.recorded else wide, [], [], [], True)
        wide = wide[:0] if recorder._queue.qsize() > 3 else wide
    assert recorder.dropped > 0
    assert recorder.ended == "the writer fell behind"
    drain = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(reading, 1 << 16), b"")])
    drain.start()
    recorder.close()
    drain.join()
    os.close(reading)


def test_a_killed_worker_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    worker = textwrap.dedent(
        f"""
        from ubatch_guard.trace import StepRecorder, TraceHeader
        recorder = StepRecorder({str(path)!r}, TraceHeader((4,), (None,), 100_000, 1))
        recorder.record([], [], [("a", 0, [list(range(90_000))])], [], [], [("a", 0, 4)], True)
        told = False
        while True:
            if recorder._queue.qsize() < 100:
                recorder.record([], [], [], [], [("a", [list(range(500))])], [("a", 4, 1)], True)
            if recorder.recorded > 50 and not told:
                told = True
                print("going", flush=True)
        """
    )
    with subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        process.send_signal(signal.SIGKILL)
    content = path.read_bytes()
    lines = content.count(b"\n")
    assert lines > 50
    assert len(_read(path, partial=True)) == lines - 1
    # A line is one write: the kill hardly ever parts it, and where it does the strict reader says so.
    if content.endswith(b"\n"):
        assert len(_read(path)) == lines - 1


def test_a_worker_that_just_ends_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    worker = textwrap.dedent(
        f"""
        from ubatch_guard.trace import StepRecorder, TraceHeader
        recorder = StepRecorder({str(path)!r}, TraceHeader((4,), (None,), 1000, 1))
        recorder.record([], [], [("a", 0, [[1]])], [], [], [("a", 0, 4)], True)
        for _ in range(500):
            recorder.record([], [], [], [], [], [("a", 4, 0)], True)
        """
    )
    subprocess.run([sys.executable, "-c", worker], check=True, timeout=60)
    assert len(_read(path)) == 501
