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

from ubatch_guard.trace import (
    Admission,
    Appended,
    Changes,
    StepRecord,
    StepRecorder,
    TraceHeader,
    TraceReader,
)
from ubatch_guard.trace.recorder import trace_path

HEADER = TraceHeader((4,), (None,), 1000, 1)
ROWS = [[1, 2, 3]]


def _read(path: Path, *, partial: bool = False) -> list[StepRecord]:
    with TraceReader(path, partial=partial) as trace:
        return list(trace)


def _step(*batch: tuple[Any, int, int], **changes: Any) -> StepRecord:
    ids, computed, scheduled = zip(*batch, strict=True) if batch else ((), (), ())
    return StepRecord(Changes(**changes), ids, np.array(computed, np.int32), np.array(scheduled, np.int32))


def _first(recorder: StepRecorder) -> None:
    recorder.record(_step(("a", 0, 4), new=[Admission("a", 0, ROWS)]))


def _further(recorder: StepRecorder) -> None:
    recorder.record(_step(("a", 4, 1)))


def test_what_is_recorded_can_be_read(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    recorder.record(_step(("a", 0, 8), new=[Admission("a", 0, [np.array([1, 2], dtype=np.int64)])]))
    second = _step(("a", 8, 1), appended=Appended(["a"], [([3],)]))
    second.vllm_allows = np.False_
    recorder.record(second)
    recorder.record(_step(preempted={"a"}))
    recorder.record(_step(("a", 4, 2), resumed=[Admission("a", 4, [[5, 6]])]))
    recorder.record(_step(finished=["a"]))
    recorder.close()
    assert (recorder.recorded, recorder.dropped) == (5, 0)
    one, two, three, four, five = _read(recorder.path)
    assert one.changes.new[0].rows[0].tolist() == [1, 2]
    assert two.changes.appended.rows[0][0].tolist() == [3]
    assert (two.num_computed_tokens.tolist(), two.num_scheduled_tokens.tolist()) == ([8], [1])
    assert (one.vllm_allows, two.vllm_allows) == (True, False)
    assert three.changes.preempted == ("a",)
    (resumed,) = four.changes.resumed
    assert (resumed.num_computed_tokens, resumed.rows[0].tolist()) == (4, [5, 6])
    assert five.changes.finished == ("a",)


def test_what_version_2_can_say_is_recorded(tmp_path: Path) -> None:
    header = TraceHeader((4,), (None,), 1000, None, decode_query_len=4)
    recorder = StepRecorder(tmp_path / "t.jsonl", header)
    _first(recorder)
    session = _step(("a", 4, 8), new=[Admission("a", 4, [[1, 4, 5]])])
    session.cuts, session.ranks_agreed = np.array([4]), True
    recorder.record(session)
    whole = _step(("a", 4, 8), set_back=["a"], appended=Appended(["a"], [None]))
    whole.cuts, whole.ranks_agreed = (), False
    recorder.record(whole)
    recorder.close()
    with TraceReader(recorder.path) as trace:
        assert (trace.header, trace.header.decode_threshold) == (header, None)
        first, second, third = trace
    assert (first.cuts, first.ranks_agreed, first.changes.set_back) == (None, None, ())
    assert (second.cuts, second.ranks_agreed) == ((4,), True)
    assert second.changes.new[0].rows[0].tolist() == [1, 4, 5]
    assert (third.cuts, third.ranks_agreed, third.changes.set_back) == ((), False, ("a",))
    assert third.changes.appended.request_ids == ()


def test_lists_and_arrays_may_change_after_the_step(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    for _ in range(50):
        recorder.record(_step())
    step = _step(("a", 0, 8), new=[Admission("a", 0, [row := [1, 2]])], finished=(gone := ["x"]))
    recorder.record(step)
    row.append(999_999)
    gone.append("a")
    step.num_computed_tokens[0] = 999
    recorder.close()
    last = _read(recorder.path)[-1]
    assert last.changes.new[0].rows[0].tolist() == [1, 2]
    assert (last.changes.finished, last.num_computed_tokens.tolist()) == ((), [0])


def test_ids_without_rows_are_left_out(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    _first(recorder)
    recorder.record(_step(finished=["never seen"], preempted=["nor this", "a"]))
    recorder.record(_step(preempted=["a"], resumed=[Admission("b", 0, ROWS)]))
    recorder.record(_step(finished=["a", "b"], preempted=["b"]))
    recorder.close()
    records = _read(recorder.path)
    assert [record.changes.finished for record in records] == [(), (), (), ("a", "b")]
    assert [record.changes.preempted for record in records] == [(), ("a",), (), ("b",)]
    assert records[2].changes.new[0].request_id == "b", "it is new to the trace"


@pytest.mark.parametrize("hash_ids", [False, True])
def test_ids_that_are_no_text_are_recorded_as_text(tmp_path: Path, hash_ids: bool) -> None:
    ids = [5, "5", "\ud800", "caf\u00e9", b"x", None, ("a", 1), "str '\\ud801'", "\ud801\n"]
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER, hash_ids=hash_ids)
    recorder.record(_step(*((each, 0, 4) for each in ids), new=[Admission(each, 0, ROWS) for each in ids]))
    recorder.record(_step(finished=ids))
    recorder.close()
    assert recorder.recorded == 2, recorder.ended
    first, second = _read(recorder.path)
    assert len(set(first.request_ids)) == len(ids)
    assert second.changes.finished == first.request_ids
    if not hash_ids:
        assert [first.request_ids[place] for place in (0, 1, 3)] == ["int 5", "5", "caf\u00e9"]


def test_hashed_ids_tell_nothing_and_fit_together(tmp_path: Path) -> None:
    names = []
    for number in range(2):
        recorder = StepRecorder(tmp_path / f"{number}.jsonl", HEADER, hash_ids=True)
        recorder.record(_step(("alice", 0, 4), new=[Admission("alice", 0, ROWS)]))
        recorder.record(_step(("alice", 4, 1), set_back=["alice"], appended=Appended(["alice"], [[[7]]])))
        recorder.record(_step(preempted=["alice"]))
        recorder.record(_step(finished=["alice"]))
        recorder.close()
        assert b"alice" not in recorder.path.read_bytes()
        first, *_, last = _read(recorder.path)
        assert last.changes.finished == first.request_ids
        names += first.request_ids
    assert names[0] != names[1], "the key is drawn for each trace"


def test_the_file_never_passes_its_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    assert not recorder.open
    assert caplog.text.count("ends: ") == len(caplog.records) == 1, "said once"


def test_a_bound_below_the_header_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="header"):
        StepRecorder(tmp_path / "t.jsonl", HEADER, max_bytes=10)
    assert not (tmp_path / "t.jsonl").exists()


def test_a_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        StepRecorder(tmp_path / "nowhere" / "t.jsonl", HEADER)


NOT_RECORDABLE: dict[str, Any] = {
    "no step": None,
    "no list": _step(finished=None),
    "no admission": _step(new=[("a",)]),
    "rows of objects": _step(new=[Admission("b", 0, [[object()]])]),
    "counts of objects": StepRecord(Changes(), ["a"], [object()], [1]),
    "ids that cannot be shown": _step((type("Bad", (), {"__repr__": lambda self: 1 / 0})(), 0, 1)),
    "a batch with an unknown request": _step(("b", 0, 1)),
    "growth of an unknown request": _step(appended=Appended(["b"], [[[1]]])),
    "a row that is longer than a line": _step(new=[Admission("b", 0, [[10_000_000] * 2_000_000])]),
}


@pytest.mark.parametrize("step", NOT_RECORDABLE.values(), ids=NOT_RECORDABLE)
def test_a_step_that_cannot_be_recorded_does_not_fail(
    step: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    _first(recorder)
    recorder.record(step)
    _further(recorder)
    recorder.close()
    # The trace ends before the step, for one with a hole could not be replayed.
    assert recorder.recorded == len(_read(recorder.path)) == 1
    assert recorder.dropped == 2
    assert recorder.ended not in (None, "closed")
    (line,) = caplog.records
    assert recorder.ended in line.getMessage()


def test_recording_after_the_close_does_not_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    _first(recorder)
    recorder.close()
    recorder.close()
    _further(recorder)
    assert (recorder.recorded, recorder.dropped, recorder.ended) == (1, 1, "closed")
    assert not caplog.records


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
    wide = _step(new=[Admission("a", 0, [list(range(100_000))])])
    for _ in range(1500):
        recorder.record(wide)
        wide = _step() if recorder._queue.qsize() > 3 else wide
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
        import numpy as np
        from ubatch_guard.trace import Admission, Appended, Changes, StepRecord, StepRecorder, TraceHeader
        recorder = StepRecorder({str(path)!r}, TraceHeader((4,), (None,), 100_000, 1))
        def record(**changes):
            recorder.record(StepRecord(Changes(**changes), ["a"], np.array([4]), np.array([1])))
        record(new=[Admission("a", 0, [list(range(90_000))])])
        told = False
        while True:
            if recorder._queue.qsize() < 100:
                record(appended=Appended(["a"], [[list(range(500))]]))
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
        import numpy as np
        from ubatch_guard.trace import Admission, Changes, StepRecord, StepRecorder, TraceHeader
        recorder = StepRecorder({str(path)!r}, TraceHeader((4,), (None,), 1000, 1))
        changes = Changes(new=[Admission("a", 0, [[1]])])
        for _ in range(501):
            recorder.record(StepRecord(changes, ["a"], np.array([4]), np.array([0])))
            changes = Changes()
        """
    )
    subprocess.run([sys.executable, "-c", worker], check=True, timeout=60)
    assert len(_read(path)) == 501


def test_a_trace_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        recorder = StepRecorder(tmp_path / "t.jsonl", HEADER)
    finally:
        os.umask(before)
    recorder.close()
    assert recorder.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.timeout(60)
@pytest.mark.parametrize("taken", ["file", "link", "dangling link", "pipe", "folder"])
def test_a_name_that_is_taken_is_left_alone(taken: str, tmp_path: Path) -> None:
    pattern = str(tmp_path / "steps.{rank}.jsonl")
    path = trace_path(pattern, "3")
    other = tmp_path / "other"
    if taken == "file":
        path.write_text("precious")
    elif taken == "pipe":
        os.mkfifo(path)
    elif taken == "folder":
        path.mkdir()
    else:
        if taken == "link":
            other.write_text("precious")
        path.symlink_to(other)
    with pytest.raises(FileExistsError):
        StepRecorder(path, HEADER)
    recorder = StepRecorder.create(pattern, "3", HEADER)
    _first(recorder)
    recorder.close()
    assert recorder.path == tmp_path / f"steps.{os.getpid()}-1.3.jsonl"
    assert len(_read(recorder.path)) == 1
    if taken in ("file", "link"):
        assert path.read_text() == "precious"
    assert other.exists() is (taken == "link")


def test_two_runners_of_a_process_have_a_file_each(tmp_path: Path) -> None:
    pattern = str(tmp_path / "steps.jsonl")
    recorders = [StepRecorder.create(pattern, "0", HEADER) for _ in range(3)]
    for number, recorder in enumerate(recorders):
        _first(recorder)
        for _ in range(number):
            _further(recorder)
    for recorder in recorders:
        recorder.close()
    assert [len(_read(recorder.path)) for recorder in recorders] == [1, 2, 3]
    assert len({recorder.path for recorder in recorders}) == 3


def test_where_a_trace_goes() -> None:
    pid = os.getpid()
    assert [str(trace_path(*arguments)) for arguments in PATHS] == [
        path.replace("PID", str(pid)) for path in PATHS.values()
    ]


PATHS: dict[tuple[Any, ...], str] = {
    ("steps.jsonl", "0"): "steps.PID.jsonl",
    ("/a/steps.{rank}.jsonl", "7"): "/a/steps.PID.7.jsonl",
    ("/a/steps.{rank}.jsonl", "7", 2): "/a/steps.PID-2.7.jsonl",
    ("/a.b/steps-{pid}.x", "0", 1): "/a.b/steps-PID-1.x",
    ("/a/{pid}/steps", "0"): "/a/PID/steps.PID",
    ("/a/{pid}/steps.x", "0", 1): "/a/PID/steps.PID-1.x",
    ("{", "0"): "{.PID",
}


@pytest.mark.parametrize("pattern", ["/t/{PID}.jsonl", "{foo}", "a.{rank}.{}", "{pid}{Rank}"])
def test_an_unknown_placeholder_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="unknown placeholder"):
        trace_path(pattern, "0")


def test_a_rank_cannot_leave_the_folder() -> None:
    with pytest.raises(ValueError, match="rank"):
        trace_path("t.{rank}", "../../etc/x")


@pytest.mark.parametrize(
    "header",
    [
        TraceHeader((), (), 10, 1),
        TraceHeader((4,), (None,), 2**31 - 1, 1),
        TraceHeader((4,), (None,), 10, 1, num_ubatches=1),
        TraceHeader((4,), (None,), 10, 1, decode_query_len=0),
    ],
)
def test_a_header_that_no_reader_takes_is_an_error(header: TraceHeader, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"block_sizes|num_blocks|num_ubatches|decode_query_len"):
        StepRecorder(tmp_path / "t.jsonl", header)
    assert not (tmp_path / "t.jsonl").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_does_not_write_its_parents_trace(tmp_path: Path) -> None:
    worker = textwrap.dedent(
        f"""
        import os
        import numpy as np
        from ubatch_guard.trace import Admission, Changes, StepRecord, StepRecorder, TraceHeader
        recorder = StepRecorder({str(tmp_path / "t.jsonl")!r}, TraceHeader((4,), (None,), 1000, 1))
        step = StepRecord(Changes(), [], np.array([], int), np.array([], int))
        recorder.record(step)
        if (child := os.fork()) == 0:
            for _ in range(3):
                recorder.record(step)
            assert (recorder.open, recorder.dropped) == (False, 3), recorder.ended
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        recorder.record(step)
        """
    )
    done = subprocess.run([sys.executable, "-c", worker], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(_read(tmp_path / "t.jsonl")) == 2
