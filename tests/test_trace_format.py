"""Reading and writing traces: every compression, and everything that can be wrong with a file."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from ubatch_guard._core import Mirror
from ubatch_guard.step import KVCacheGroup
from ubatch_guard.trace import (
    Replay,
    StepRecord,
    TraceError,
    TraceHeader,
    TraceReader,
    TraceWriter,
    apply_changes,
)
from ubatch_guard.trace.format import (
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_LINE_BYTES,
    MAX_LINE_CONTAINERS,
    MAX_ROW_ENTRIES,
    MAX_UBATCHES,
)
from ubatch_guard.trace.replay import MAX_TABLE_ENTRIES, PlainRows, TooWideError

TRACES = sorted((Path(__file__).parent / "traces").rglob("*.jsonl.gz"))

HEADER = {
    "format": "ubatch-guard-steps",
    "version": 1,
    "block_sizes": [4, 4],
    "sliding_windows": [None, 8],
    "num_blocks": 10,
    "decode_threshold": 1,
    "num_ubatches": 2,
}

HEADER_2 = {**HEADER, "version": 2, "decode_query_len": 4}


def _admit(*ids: str, batch: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "finished": [],
        "preempted": [],
        "new": [[request_id, 0, [[1, 2], [3]]] for request_id in ids],
        "resumed": [],
        "appended": [],
        "batch": [[request_id, 0, 4] for request_id in ids] if batch is None else batch,
        "vllm_allows": True,
        **more,
    }


def _text(*lines: object) -> bytes:
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


def _write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    return path


def _read(path: Path, *, partial: bool = False) -> list[StepRecord]:
    with TraceReader(path, partial=partial) as trace:
        return list(trace)


def _plain(record: StepRecord) -> dict[str, Any]:
    changes, appended = record.changes, record.changes.appended
    return {
        "finished": list(changes.finished),
        "preempted": list(changes.preempted),
        "new": [[e.request_id, e.num_computed_tokens, [row.tolist() for row in e.rows]] for e in changes.new],
        "resumed": [
            [e.request_id, e.num_computed_tokens, [row.tolist() for row in e.rows]] for e in changes.resumed
        ],
        "appended": [
            [request_id, [row.tolist() for row in rows]]
            for request_id, rows in zip(appended.request_ids, appended.rows, strict=True)
        ],
        "batch": [
            list(entry)
            for entry in zip(
                record.request_ids,
                record.num_computed_tokens.tolist(),
                record.num_scheduled_tokens.tolist(),
                strict=True,
            )
        ],
        "vllm_allows": record.vllm_allows,
    }


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_trace_written_again_says_the_same(path: Path, suffix: str, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    copy = tmp_path / f"copy{suffix}"
    with TraceReader(path) as trace, TraceWriter(copy, trace.header) as writer:
        for record in trace:
            writer.write(record)
        assert trace.line == len(lines)
    with TraceReader(copy) as again:
        assert again.header == trace.header
        assert [_plain(record) for record in again] == lines[1:]


def test_header_gives_the_groups(tmp_path: Path) -> None:
    path = _write(tmp_path, _text({**HEADER, "attention_chunk_sizes": [16, None], "later": {"key": 1}}))
    with TraceReader(path) as trace:
        assert trace.header.groups == (
            KVCacheGroup(4, 10, attention_chunk_size=16),
            KVCacheGroup(4, 10, sliding_window=8),
        )
        assert list(trace) == []


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    (record,) = _read(_write(tmp_path, _text({**HEADER, "x": 1}, {**_admit("a"), "settled": [["a", 3]]})))
    assert record.request_ids == ("a",)


def test_last_line_may_lack_its_line_feed(tmp_path: Path) -> None:
    assert len(_read(_write(tmp_path, _text(HEADER, _admit("a"))[:-1]))) == 1


def test_compression_is_told_by_content(tmp_path: Path) -> None:
    text = _text(HEADER, _admit("a"))
    for content in (text, gzip.compress(text), zstandard.compress(text)):
        assert len(_read(_write(tmp_path, content))) == 1


def test_several_streams_in_a_file_are_one(tmp_path: Path) -> None:
    first, second = _text(HEADER), _text(_admit("a"))
    for compress in (gzip.compress, zstandard.compress):
        assert len(_read(_write(tmp_path, compress(first) + compress(second)))) == 1


def test_preempted_requests_may_finish_or_come_back(tmp_path: Path) -> None:
    rows = [[1, 2], [3]]
    records = _read(
        _write(
            tmp_path,
            _text(
                HEADER,
                _admit("a", "b", "c", "d", "e"),
                _admit(preempted=["a", "b", "c", "e"], finished=["e"]),
                _admit(finished=["a"], resumed=[["b", 3, rows]], new=[["c", 0, rows]]),
                _admit(finished=["d"], new=[["d", 0, rows]], batch=[["b", 3, 1], ["c", 0, 4], ["d", 0, 4]]),
            ),
        )
    )
    assert records[-1].request_ids == ("b", "c", "d")


# What is wrong, the lines, the line that is named, and words of the reason.
WRONG = {
    "empty": ([], 1, "no header"),
    "header not JSON": ([b"nonsense"], 1, "not JSON"),
    "header not an object": ([[1]], 1, "not a JSON object"),
    "other format": ([{**HEADER, "format": "other"}], 1, "format"),
    "no format": ([{"version": 1}], 1, "format"),
    "version 0": ([{**HEADER, "version": 0}], 1, "version is 0"),
    "version 3": ([{**HEADER, "version": 3}], 1, "version is 3; known are 1 to 2"),
    "version true": ([{**HEADER, "version": True}], 1, "version"),
    "no block sizes": ([{k: v for k, v in HEADER.items() if k != "block_sizes"}], 1, "block_sizes"),
    "empty block sizes": ([{**HEADER, "block_sizes": []}], 1, "block_sizes"),
    "block size 0": ([{**HEADER, "block_sizes": [0, 4]}], 1, "block_sizes"),
    "block size a float": ([{**HEADER, "block_sizes": [4.0, 4]}], 1, "block_sizes"),
    "a window too few": ([{**HEADER, "sliding_windows": [None]}], 1, "sliding_windows"),
    "window 0": ([{**HEADER, "sliding_windows": [None, 0]}], 1, "sliding_windows"),
    "no blocks": ([{**HEADER, "num_blocks": 0}], 1, "num_blocks"),
    "too many blocks": ([{**HEADER, "num_blocks": 2**31}], 1, "num_blocks"),
    "negative threshold": ([{**HEADER, "decode_threshold": -1}], 1, "decode_threshold"),
    "one microbatch": ([{**HEADER, "num_ubatches": 1}], 1, "num_ubatches"),
    "line not JSON": ([HEADER, _admit("a"), b'{"finished": ['], 3, "not JSON"),
    "blank line": ([HEADER, b"", _admit("a")], 2, "not JSON"),
    "line not UTF-8": ([HEADER, b'"\xff"'], 2, "not JSON"),
    "nested beyond reason": ([HEADER, b"[" * 200_000], 2, "not JSON"),
    "endless number": ([HEADER, b'{"finished": ' + b"9" * 10_000 + b"}"], 2, "not JSON"),
    "line not an object": ([HEADER, [1, 2]], 2, "not a JSON object"),
    **{
        f"no {key}": ([HEADER, {k: v for k, v in _admit("a").items() if k != key}], 2, key)
        for key in _admit("a")
    },
    **{f"{key} a string": ([HEADER, {**_admit("a"), key: "a"}], 2, key) for key in _admit("a")},
    "finished not strings": ([HEADER, _admit(finished=[1])], 2, "finished"),
    "finished unknown": ([HEADER, _admit(finished=["a"])], 2, "unknown id 'a'"),
    "finished twice": ([HEADER, _admit("a"), _admit(finished=["a", "a"])], 3, "unknown id 'a'"),
    "preempted unknown": ([HEADER, _admit(preempted=["a"])], 2, "unknown id 'a'"),
    "new twice": ([HEADER, _admit("a"), _admit("a")], 3, "duplicate id 'a'"),
    "new twice at once": ([HEADER, _admit("a", "a")], 2, "duplicate id 'a'"),
    "new without rows": ([HEADER, _admit(new=[["a", 0]])], 2, "new"),
    "new with a negative count": ([HEADER, _admit(new=[["a", -1, [[1], [1]]]])], 2, "-1"),
    "new with rows of one group": ([HEADER, _admit(new=[["a", 0, [[1]]]])], 2, "1 lists for 2 groups"),
    "new with a flat row": ([HEADER, _admit(new=[["a", 0, [1, 2]]])], 2, "list of block ids"),
    "new with half a surrogate": ([HEADER, _admit("\ud800")], 2, "Unicode"),
    "resumed unknown": ([HEADER, _admit(resumed=[["a", 0, [[1], [1]]]])], 2, "unknown id 'a'"),
    "appended unknown": ([HEADER, _admit(appended=[["a", [[1], [1]]]])], 2, "unknown id 'a'"),
    "appended to a finished": (
        [HEADER, _admit("a"), _admit(finished=["a"], appended=[["a", [[1], [1]]]])],
        3,
        "unknown id 'a'",
    ),
    "block too large": ([HEADER, _admit(new=[["a", 0, [[1], [10]]]])], 2, "10 is not"),
    "block beyond 64 bits": ([HEADER, _admit(new=[["a", 0, [[1], [2**70]]]])], 2, "is not an integer"),
    "block negative": ([HEADER, _admit(new=[["a", 0, [[1, -1], [1]]]])], 2, "-1 is not"),
    "block true": ([HEADER, _admit(new=[["a", 0, [[1, True], [1]]]])], 2, "True is not"),
    "block a string": ([HEADER, _admit(new=[["a", 0, [["1"], [1]]]])], 2, "'1' is not"),
    "row too short": ([HEADER, _admit("a", batch=[["a", 0, 5]])], 2, "'a' in group 1 has 1 columns"),
    "row too short later": ([HEADER, _admit("a"), _admit(batch=[["a", 4, 1]])], 3, "too few for 5 tokens"),
    "batch unknown": ([HEADER, _admit("a", batch=[["a", 0, 4], ["b", 0, 4]])], 2, "unknown id 'b'"),
    "batch twice": ([HEADER, _admit("a", batch=[["a", 0, 4], ["a", 0, 4]])], 2, "duplicate id 'a'"),
    "batch of pairs": ([HEADER, _admit("a", batch=[["a", 0]])], 2, "batch"),
    "batch of numbers": ([HEADER, _admit("a", batch=[[1, 0, 4]])], 2, "strings"),
    "batch negative": ([HEADER, _admit("a", batch=[["a", 0, -4]])], 2, "-4"),
    "batch beyond 31 bits": ([HEADER, _admit("a", batch=[["a", 0, 2**31]])], 2, str(2**31)),
}

WRONG |= {
    "too many groups": ([{**HEADER, "block_sizes": [4] * 65}], 1, "65 entries"),
    "pools too large together": ([{**HEADER, "num_blocks": 2**25 + 1}], 1, "2 pools of 33554433"),
    "microbatches beyond reason": ([{**HEADER, "num_ubatches": 2**31 - 1}], 1, "num_ubatches"),
    "window and chunk": (
        [{**HEADER, "attention_chunk_sizes": [None, 8]}],
        1,
        "a sliding window and an attention chunk",
    ),
    "lists beyond number": ([HEADER, b'{"finished":' + b"[" * 2**18 + b"]}"], 2, "lists and objects"),
    "tokens beyond 31 bits together": (
        [
            {**HEADER, "block_sizes": [2**30, 2**30]},
            _admit("a", "b", batch=[["a", 0, 2**30], ["b", 0, 2**30]]),
        ],
        2,
        "2147483648 scheduled tokens",
    ),
    "resumed twice at once": (
        [HEADER, _admit("a"), _admit(resumed=[["a", 0, [[1], [1]]], ["a", 0, [[1], [1]]]])],
        3,
        "resumed: duplicate id 'a'",
    ),
    "no query length": ([{**HEADER, "version": 2}], 1, "'decode_query_len' is missing"),
    "query length 0": ([{**HEADER_2, "decode_query_len": 0}], 1, "decode_query_len"),
    "new twice at once in version 2": ([HEADER_2, _admit("a", "a")], 2, "duplicate id 'a'"),
    "set back a string": ([HEADER_2, _admit("a", set_back="a")], 2, "set_back"),
    "set back unknown": ([HEADER_2, _admit("a", set_back=["b"])], 2, "set_back: unknown id 'b'"),
    "set back and preempted": (
        [HEADER_2, _admit("a"), _admit(preempted=["a"], set_back=["a"])],
        3,
        "set_back: unknown id 'a'",
    ),
    "cuts a number": ([HEADER_2, _admit("a", cuts=2)], 2, "cuts is 2"),
    "cut 0": ([HEADER_2, _admit("a", cuts=[0])], 2, "cuts: 0 is not"),
    "cut true": ([HEADER_2, _admit("a", cuts=[True])], 2, "cuts: True is not"),
    "cuts descending": ([{**HEADER_2, "num_ubatches": 3}, _admit("a", cuts=[2, 2])], 2, "2 is not"),
    "more cuts than microbatches": ([HEADER_2, _admit("a", cuts=[1, 2])], 2, "2 for 2 microbatches"),
    "ranks agreed by number": ([HEADER_2, _admit("a", ranks_agreed=1)], 2, "ranks_agreed is 1"),
}


@pytest.mark.parametrize(("lines", "line", "reason"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_with_its_line(
    lines: list[object], line: int, reason: str, tmp_path: Path
) -> None:
    path = _write(tmp_path, _text(*lines))
    with pytest.raises(TraceError, match=re.escape(reason)) as caught:
        _read(path)
    assert (caught.value.path, caught.value.line) == (str(path), line)
    assert str(caught.value) == f"{path}:{line}: {caught.value.reason}"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere.jsonl", ""])
def test_a_file_that_cannot_be_opened(name: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        _read(tmp_path / name)
    assert caught.value.line == 0


def _steps() -> bytes:
    computed = np.random.default_rng(0).integers(0, 10**9, 5000).tolist()
    return _text(HEADER, _admit("a"), *[_admit(batch=[["a", 0, 4]], comment=count) for count in computed])


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_stream_cut_short(compress: Any, tmp_path: Path) -> None:
    content = compress(_steps())
    for length in (len(content) - 1, len(content) * 2 // 3):
        path = _write(tmp_path, content[:length])
        with pytest.raises(TraceError, match="truncated") as caught:
            _read(path)
        assert caught.value.line > 1
        whole = _read(path, partial=True)
        # The error names the line that could not be read any more.
        assert len(whole) == caught.value.line - 2


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_damaged_stream(compress: Any, tmp_path: Path) -> None:
    content = bytearray(compress(np.random.default_rng(0).bytes(5000).hex().encode()))
    content[len(content) // 2] ^= 0xFF
    with pytest.raises(TraceError):
        _read(_write(tmp_path, bytes(content)))


def test_rubbish_behind_a_gzip_stream(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="gzip"):
        _read(_write(tmp_path, gzip.compress(_text(HEADER, _admit("a"))) + b"rubbish"))


def test_a_plain_trace_cut_short(tmp_path: Path) -> None:
    path = _write(tmp_path, _text(HEADER, _admit("a"), _admit(batch=[["a", 0, 4]]))[:-10])
    with pytest.raises(TraceError, match="breaks off") as caught:
        _read(path)
    assert caught.value.line == 3
    assert len(_read(path, partial=True)) == 1


def test_partial_forgives_nothing_but_the_end(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not JSON"):
        _read(_write(tmp_path, _text(HEADER, b"{", _admit("a"))), partial=True)


def test_every_prefix_of_a_trace_is_read_or_refused(tmp_path: Path) -> None:
    content = _text(HEADER, _admit("a"), _admit(finished=["a"]))
    for length in range(len(content)):
        try:
            records = _read(_write(tmp_path, content[:length]))
        except TraceError:
            continue
        # Only where a line ends is the rest no loss that could be seen.
        assert content[length - 1 : length] == b"\n" or content[length : length + 1] == b"\n"
        assert len(records) == content[: length + 1].count(b"\n") - 1


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl.gz"
    line = _text(_admit(batch=[["a", 0, 4]], comment="x" * 4000))
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(_text(HEADER, _admit("a")))
        for _ in range(10):
            file.write(line * 500)
    assert len(line) * 5000 > 20_000_000
    tracemalloc.start()
    with TraceReader(path) as trace:
        steps = sum(1 for _ in trace)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert steps == 5001
    assert peak < 8 << 20


def test_version_2_says_what_came_of_a_step(tmp_path: Path) -> None:
    again = ["a", 4, [[5, 6], [7, 8]]]
    path = _write(
        tmp_path,
        _text(
            {**HEADER_2, "decode_threshold": None, "num_ubatches": 3},
            _admit("a", "b"),
            _admit(new=[again], set_back=["b"], cuts=[1, 3], ranks_agreed=True, batch=[["a", 4, 4]]),
            _admit(cuts=[], ranks_agreed=False),
            _admit(cuts=None, ranks_agreed=None),
        ),
    )
    with TraceReader(path) as trace:
        assert (trace.header.version, trace.header.decode_query_len) == (2, 4)
        assert trace.header.decode_threshold is None
        first, second, third, fourth = trace
    assert (first.cuts, first.ranks_agreed, first.changes.set_back) == (None, None, ())
    assert (second.cuts, second.ranks_agreed, second.changes.set_back) == ((1, 3), True, ("b",))
    assert second.changes.new[0].rows[0].tolist() == [5, 6]
    assert (third.cuts, third.ranks_agreed) == ((), False)
    assert (fourth.cuts, fourth.ranks_agreed) == (None, None)


def test_version_1_cannot_say_it(tmp_path: Path) -> None:
    """What stands there is a key that version 1 does not know."""
    said = _admit("a", set_back=["a"], cuts=[1], ranks_agreed=True)
    (record,) = _read(_write(tmp_path, _text({**HEADER, "decode_query_len": 9}, said)))
    assert (record.cuts, record.ranks_agreed, record.changes.set_back) == (None, None, ())


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_is_kept_when_it_is_written_again(version: int, tmp_path: Path) -> None:
    said = {"set_back": ["a"], "cuts": [2], "ranks_agreed": True} if version == 2 else {}
    header = HEADER_2 if version == 2 else HEADER
    path = _write(tmp_path, _text(header, _admit("a", **said), _admit("b", **said)))
    copy = tmp_path / "copy.jsonl"
    with TraceReader(path) as trace, TraceWriter(copy, trace.header) as writer:
        for record in trace:
            writer.write(record)
    lines = [json.loads(line) for line in copy.read_text().splitlines()]
    assert lines[0] == {**lines[0], **header}
    assert lines[1:] == [_admit("a", **said), _admit("b", **said)]


def test_a_session_comes_again_while_its_row_lives(tmp_path: Path) -> None:
    """Mirror and plain rows take the new row for the old one."""
    again = _admit(new=[["a", 4, [[5, 6], [7, 9]]]], batch=[["a", 4, 1]])
    more = _admit(appended=[["a", [[8], []]]], batch=[["a", 5, 1]])
    with TraceReader(_write(tmp_path, _text(HEADER_2, _admit("a"), again, more))) as trace:
        mirror, plain = Mirror(trace.header.groups), PlainRows()
        for record in trace:
            for store in (mirror, plain):
                apply_changes(store, record.changes)
    assert mirror.row("a", 0).tolist() == plain["a"][0].tolist() == [5, 6, 8]
    assert mirror.row("a", 1).tolist() == plain["a"][1].tolist() == [7, 9]


def test_a_step_wider_than_the_reference_can_take_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ubatch_guard.trace.replay.MAX_TABLE_ENTRIES", 5)
    with TraceReader(_write(tmp_path, _text(HEADER, _admit("a"), _admit("b", batch=[]), _admit()))) as trace:
        replay = Replay(trace.header)
        steps = iter(trace)
        assert replay.step(next(steps)).num_reqs == 1
        both = next(steps)
        both.request_ids = ("a", "b")
        with pytest.raises(TooWideError, match="2 rows and 3 columns"):
            replay.step(both)


def test_the_documents_bounds_are_the_codes() -> None:
    text = (Path(__file__).parent.parent / "docs" / "trace-format.md").read_text()
    assert f"{MAX_LINE_BYTES >> 20} MiB, with {MAX_LINE_CONTAINERS:,} opening" in text
    assert f"| KV cache groups | {MAX_GROUPS} |" in text
    assert f"| microbatches | 2 to {MAX_UBATCHES:,};" in text
    assert MAX_BLOCKS == MAX_ROW_ENTRIES == MAX_TABLE_ENTRIES == 2**26
    assert text.count("2^26") == 3


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ubatch_guard.trace.lines.MAX_LINE_BYTES", 1 << 21)
    with pytest.raises(TraceError, match="line of more than"):
        _read(_write(tmp_path, gzip.compress(_text(HEADER) + b" " * (1 << 23))))


def test_rows_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ubatch_guard.trace.parser.MAX_ROW_ENTRIES", 9)
    grow = _admit(appended=[["a", [[1], [1, 1]]]])
    path = _write(tmp_path, _text(HEADER, _admit("a"), grow, _admit("b", finished=["a"]), _admit("c"), grow))
    with pytest.raises(TraceError, match="unknown id 'a'") as caught:
        _read(path)
    assert caught.value.line == 6, "what is finished counts no more"
    path = _write(tmp_path, _text(HEADER, _admit("a"), grow, grow, grow))
    with pytest.raises(TraceError, match="more than 9 block ids") as caught:
        _read(path)
    assert caught.value.line == 5


def _bombs() -> dict[str, bytes]:
    """What a small compressed file can hold."""

    def line(new: bytes) -> bytes:
        return _text(HEADER) + json.dumps(_admit()).encode().replace(b'"new": []', b'"new": ' + new) + b"\n"

    room = MAX_LINE_BYTES - 1000
    return {
        "one endless line": _text(HEADER) + b" " * (1 << 28),
        "empty lists": line(b"[" + b"[]," * (room // 3) + b"0]"),
        "objects": line(b"[" + b'{"":0},' * (MAX_LINE_CONTAINERS - 100) + b"0]"),
        "block ids": line(b'[["a",0,[[' + b"1234," * (room // 5) + b"0]]]]"),
        "strings": line(b"[" + b'"a\xc3\xa9",' * (room // 6) + b"0]"),
    }


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("content", _bombs().values(), ids=_bombs())
def test_a_small_file_does_not_fill_the_memory(content: bytes, compress: Any, tmp_path: Path) -> None:
    path = _write(tmp_path, compress(content))
    assert path.stat().st_size < 300_000
    code = (
        "import resource, sys\n"
        "from ubatch_guard.trace import TraceError, TraceReader\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    list(TraceReader(sys.argv[1]))\n"
        "except TraceError as error:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error.line)\n"
    )
    said = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    grown, line = map(int, said.stdout.split())
    assert line == 2
    assert grown < 500_000, "kilobytes"


def test_writer_knows_its_header(tmp_path: Path) -> None:
    header = TraceHeader((16,), (None,), 100, None, workload="w", options={"seed": 1}, source="test")
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, header):
        pass
    with TraceReader(path) as trace:
        assert trace.header == header
