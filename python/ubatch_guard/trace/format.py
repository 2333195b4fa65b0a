"""The trace format ``ubatch-guard-steps``, version 1: one JSON object a line, a header and then the steps.

A trace is read and written a line at a time, as plain text, gzip or zstd. Keys that are not known are
ignored, so that later writers can say more.
"""

from __future__ import annotations

import gzip
import json
import reprlib
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from ubatch_guard.step import IntArray, KVCacheGroup

FORMAT = "ubatch-guard-steps"
VERSION = 1
NULL_BLOCK = 0
"""Version 1 knows vLLM's null block only."""

Rows = tuple[npt.NDArray[np.int32], ...]
"""Block ids per KV cache group, each int32 of shape ``[columns]``."""

_CHUNK_BYTES = 1 << 20
_ZSTD_CHUNK_BYTES = 1 << 12
"""Compressed bytes at a time: zstd gives out all that they hold, up to 30,000 times as much."""
_MAX_LINE_BYTES = 1 << 28
"""Far above a real step; where it is passed, the file is no trace or a decompression bomb."""
_INT32_MAX = int(np.iinfo(np.int32).max)


class TraceError(ValueError):
    """A trace that cannot be read.

    Attributes:
        path: The file.
        line: The line, from 1; 0 where the file could not be opened.
        reason: What is wrong, in one line.
    """

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(path, line, reason)
        self.path = path
        self.line = line
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What holds for every step of a trace.

    Attributes:
        block_sizes: Tokens per block-table column, per KV cache group.
        sliding_windows: Window in tokens or None, per KV cache group.
        num_blocks: Blocks in each group's pool; block 0 is the null block.
        decode_threshold: The attention backend's ``reorder_batch_threshold``; None: it does not reorder.
        num_ubatches: Microbatches of a split step.
        max_num_batched_tokens: Token budget of a step, if known.
        workload: Name of what was run.
        options: How it was run.
        source: What made the trace.
        attention_chunk_sizes: Chunk of chunked local attention in tokens or None, per KV cache group. An
            extension of version 1; a header without the key has none.
    """

    block_sizes: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]
    num_blocks: int
    decode_threshold: int | None
    num_ubatches: int = 2
    max_num_batched_tokens: int | None = None
    workload: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    attention_chunk_sizes: tuple[int | None, ...] | None = None

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """The KV cache groups."""
        chunks = self.attention_chunk_sizes or (None,) * len(self.block_sizes)
        return tuple(
            KVCacheGroup(
                tokens_per_column=size,
                num_blocks=self.num_blocks,
                sliding_window=window,
                attention_chunk_size=chunk,
                null_block=NULL_BLOCK,
            )
            for size, window, chunk in zip(self.block_sizes, self.sliding_windows, chunks, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """The header line as an object."""
        line: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "workload": self.workload,
            "options": dict(self.options),
            "block_sizes": list(self.block_sizes),
            "num_blocks": self.num_blocks,
            "sliding_windows": list(self.sliding_windows),
            "decode_threshold": self.decode_threshold,
            "num_ubatches": self.num_ubatches,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        if self.attention_chunk_sizes is not None:
            line["attention_chunk_sizes"] = list(self.attention_chunk_sizes)
        return line


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A request that gets a whole new row, with the tokens it starts from."""

    request_id: str
    num_computed_tokens: int
    rows: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """Blocks added to the ends of a request's rows."""

    request_id: str
    rows: Rows


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """One step of a trace: what became of the rows before it, then the batch.

    Attributes:
        finished: Ids whose rows go.
        preempted: Ids whose rows go, to come back in ``resumed`` or ``new``.
        new: Requests that the engine sees for the first time.
        resumed: Requests that come back after a preemption.
        appended: Blocks added to rows.
        request_ids: The batch, in order.
        num_computed_tokens: int32, shape ``[num_reqs]``.
        num_scheduled_tokens: int32, shape ``[num_reqs]``.
        vllm_allows: What vLLM's own guard answered.
    """

    finished: tuple[str, ...]
    preempted: tuple[str, ...]
    new: tuple[Admission, ...]
    resumed: tuple[Admission, ...]
    appended: tuple[Growth, ...]
    request_ids: tuple[str, ...]
    num_computed_tokens: npt.NDArray[np.int32]
    num_scheduled_tokens: npt.NDArray[np.int32]
    vllm_allows: bool


class TraceReader:
    """Reads a trace, a step at a time.

    ``with TraceReader(path) as trace:`` gives ``trace.header``; iterating gives :class:`StepRecord`. Ids and
    block ids are checked against the steps before: a record that comes out can be replayed.

    Args:
        path: Plain text, gzip or zstd (by its first bytes, whatever its name).
        partial: Stop at the last whole line of a trace that breaks off, as that of a killed process does,
            instead of raising.

    Raises:
        TraceError: On construction and while iterating.
    """

    def __init__(self, path: str | Path, *, partial: bool = False) -> None:
        self.path = str(path)
        self.line = 0
        """Number of the line read last, from 1."""
        self._partial = partial
        # Columns of each live request's rows, per group.
        self._columns: dict[str, list[int]] = {}
        self._preempted: set[str] = set()
        try:
            self._file = Path(path).open("rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        try:
            self._lines = self._read_lines()
            self.header = self._parse_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
        self._file.close()

    def tell(self) -> int:
        """Bytes of the file read so far, compressed as they stand there."""
        return self._file.tell()

    def __iter__(self) -> Iterator[StepRecord]:
        for line in self._lines:
            yield self._parse_step(line)

    def _error(self, reason: str) -> TraceError:
        return TraceError(self.path, self.line, reason)

    def _read_lines(self) -> Generator[dict[str, Any], None, None]:
        """The lines as JSON objects."""
        lines = _split_lines(_chunks(self._file))
        while True:
            self.line += 1
            try:
                text, whole = next(lines)
            except StopIteration:
                self.line -= 1
                return
            except _BrokenOffError as error:
                if self._partial and self.line > 1:
                    self.line -= 1
                    return
                raise self._error(str(error)) from error
            except _UnreadableError as error:
                raise self._error(str(error)) from error
            except OSError as error:
                raise self._error(error.strerror or str(error)) from error
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                if not whole and self._partial and self.line > 1:
                    self.line -= 1
                    return
                what = "not JSON" if whole else "the file breaks off in the middle of the line"
                raise self._error(f"{what}: {_one_line(error)}") from error
            if not isinstance(value, dict):
                raise self._error(f"not a JSON object: {_short(value)}")
            yield value

    def _parse_header(self) -> TraceHeader:
        line = next(self._lines, None)
        if line is None:
            self.line = 1
            raise self._error("no header line")
        if line.get("format") != FORMAT:
            raise self._error(f"format is {_short(line.get('format'))}, not {FORMAT!r}")
        if type(line.get("version")) is not int or line["version"] != VERSION:
            raise self._error(f"version is {_short(line.get('version'))}; only {VERSION} is known")
        block_sizes = self._get(line, "block_sizes", list)
        if not block_sizes:
            raise self._error("block_sizes is empty")
        for size in block_sizes:
            self._check_int("block_sizes", size, 1)
        options = line.get("options", {})
        max_num_batched_tokens = line.get("max_num_batched_tokens")
        if max_num_batched_tokens is not None:
            self._check_int("max_num_batched_tokens", max_num_batched_tokens, 0)
        chunks = line.get("attention_chunk_sizes")
        return TraceHeader(
            block_sizes=tuple(block_sizes),
            sliding_windows=self._optional_sizes(line, "sliding_windows", len(block_sizes)),
            num_blocks=self._check_int("num_blocks", self._get(line, "num_blocks", int), 1),
            decode_threshold=self._optional_int(line, "decode_threshold", 0),
            num_ubatches=self._check_int("num_ubatches", self._get(line, "num_ubatches", int), 2),
            max_num_batched_tokens=max_num_batched_tokens,
            workload=str(line.get("workload", "")),
            options=options if isinstance(options, dict) else {"options": options},
            source=str(line.get("source", "")),
            attention_chunk_sizes=None
            if chunks is None
            else self._optional_sizes(line, "attention_chunk_sizes", len(block_sizes)),
        )

    def _parse_step(self, line: dict[str, Any]) -> StepRecord:
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
        new = tuple(self._admission(entry, "new") for entry in self._get(line, "new", list))
        resumed = tuple(self._admission(entry, "resumed") for entry in self._get(line, "resumed", list))
        appended = tuple(self._growth(entry) for entry in self._get(line, "appended", list))
        request_ids, computed, scheduled = self._batch(self._get(line, "batch", list))
        return StepRecord(
            finished=finished,
            preempted=preempted,
            new=new,
            resumed=resumed,
            appended=appended,
            request_ids=request_ids,
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled,
            vllm_allows=self._get(line, "vllm_allows", bool),
        )

    def _get(self, line: dict[str, Any], key: str, kind: type) -> Any:
        """The value of a key that must be there and of a type (bool is no int here)."""
        if key not in line:
            raise self._error(f"key {key!r} is missing")
        value = line[key]
        if type(value) is not kind:
            raise self._error(f"{key} is {_short(value)}, not of type {kind.__name__}")
        return value

    def _check_int(self, what: str, value: object, least: int) -> int:
        if type(value) is not int or not least <= value <= _INT32_MAX:
            raise self._error(f"{what}: {_short(value)} is not an integer in {least}..{_INT32_MAX}")
        return value

    def _optional_int(self, line: dict[str, Any], key: str, least: int) -> int | None:
        if key not in line:
            raise self._error(f"key {key!r} is missing")
        return None if line[key] is None else self._check_int(key, line[key], least)

    def _optional_sizes(self, line: dict[str, Any], key: str, length: int) -> tuple[int | None, ...]:
        sizes = self._get(line, key, list)
        if len(sizes) != length:
            raise self._error(f"{key} has {len(sizes)} entries for {length} groups")
        return tuple(None if size is None else self._check_int(key, size, 1) for size in sizes)

    def _ids(self, line: dict[str, Any], key: str) -> tuple[str, ...]:
        ids = self._get(line, key, list)
        if not set(map(type, ids)) <= {str}:
            raise self._error(f"{key}: request ids are strings")
        return tuple(ids)

    def _leave(self, key: str, request_id: str) -> None:
        if self._columns.pop(request_id, None) is None:
            raise self._error(f"{key}: unknown id {_short(request_id)}")

    def _admission(self, entry: Any, key: str) -> Admission:
        if type(entry) is not list or len(entry) != 3 or type(entry[0]) is not str:
            raise self._error(f"{key}: {_short(entry)} is not [id, num_computed_tokens, rows]")
        request_id, computed, rows = entry
        if key == "new" and request_id in self._columns:
            raise self._error(f"new: duplicate id {_short(request_id)}")
        if key == "resumed" and request_id not in self._columns and request_id not in self._preempted:
            raise self._error(f"resumed: unknown id {_short(request_id)}")
        if not request_id.isascii():
            self._check_encodable(key, request_id)
        admission = Admission(request_id, self._check_int(key, computed, 0), self._rows(key, rows))
        self._preempted.discard(request_id)
        self._columns[request_id] = [len(row) for row in admission.rows]
        return admission

    def _check_encodable(self, key: str, request_id: str) -> None:
        """JSON can escape half a surrogate pair, which no output can show."""
        try:
            request_id.encode()
        except UnicodeEncodeError as error:
            raise self._error(f"{key}: id {_short(request_id)} is not Unicode text") from error

    def _growth(self, entry: Any) -> Growth:
        if type(entry) is not list or len(entry) != 2 or type(entry[0]) is not str:
            raise self._error(f"appended: {_short(entry)} is not [id, rows]")
        request_id, rows = entry
        if request_id not in self._columns:
            raise self._error(f"appended: unknown id {_short(request_id)}")
        growth = Growth(request_id, self._rows("appended", rows))
        columns = self._columns[request_id]
        for group, row in enumerate(growth.rows):
            columns[group] += len(row)
        return growth

    def _rows(self, key: str, rows: Any) -> Rows:
        if type(rows) is not list or not set(map(type, rows)) <= {list}:
            raise self._error(f"{key}: rows {_short(rows)} are not one list of block ids a group")
        if len(rows) != len(self.header.block_sizes):
            raise self._error(f"{key}: {len(rows)} lists for {len(self.header.block_sizes)} groups")
        last = self.header.num_blocks - 1
        return tuple(self._int32(key, "block ids", ids, last) for ids in rows)

    def _batch(
        self, entries: list[Any]
    ) -> tuple[tuple[str, ...], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        if not (set(map(type, entries)) <= {list} and set(map(len, entries)) <= {3}):
            raise self._error("batch: an entry is not [id, num_computed_tokens, num_scheduled_tokens]")
        request_ids: tuple[str, ...]
        request_ids, computed, scheduled = zip(*entries, strict=True) if entries else ((), (), ())
        if not set(map(type, request_ids)) <= {str}:
            raise self._error("batch: request ids are strings")
        unique = set(request_ids)
        if len(unique) != len(request_ids):
            raise self._error(f"batch: duplicate id {_short(_first_duplicate(request_ids))}")
        if not unique <= self._columns.keys():
            unknown = next(request_id for request_id in request_ids if request_id not in self._columns)
            raise self._error(f"batch: unknown id {_short(unknown)}")
        num_computed = self._int32("batch", "num_computed_tokens", computed, _INT32_MAX)
        num_scheduled = self._int32("batch", "num_scheduled_tokens", scheduled, _INT32_MAX)
        self._check_rows(request_ids, num_computed.astype(np.int64) + num_scheduled)
        return request_ids, num_computed, num_scheduled

    def _check_rows(self, request_ids: tuple[str, ...], num_tokens: npt.NDArray[np.int64]) -> None:
        """Check that every request's rows have a column for each of its tokens."""
        columns = np.array([self._columns[request_id] for request_id in request_ids], dtype=np.int64)
        block_sizes = np.array(self.header.block_sizes, dtype=np.int64)
        room = columns.reshape(len(request_ids), len(block_sizes)) * block_sizes
        short = room < num_tokens[:, None]
        if short.any():
            position, group = np.argwhere(short)[0].tolist()
            raise self._error(
                f"batch: the row of {_short(request_ids[position])} in group {group} has "
                f"{columns[position, group]} columns, too few for {num_tokens[position]} tokens"
            )

    def _int32(self, key: str, what: str, values: Sequence[Any], most: int) -> npt.NDArray[np.int32]:
        # A trace is mostly such lists, so they are checked whole and not number by number.
        if not set(map(type, values)) <= {int} or (values and not (min(values) >= 0 and max(values) <= most)):
            wrong = next(value for value in values if type(value) is not int or not 0 <= value <= most)
            raise self._error(f"{key}: {what}: {_short(wrong)} is not an integer in 0..{most}")
        return np.array(values, dtype=np.int32)


class TraceWriter:
    """Writes a trace, compressed after its name: ``.gz`` with gzip, ``.zst`` with zstd, others not.

    Raises:
        OSError: The file cannot be written.
        ModuleNotFoundError: zstd without the ``zstandard`` package (extra ``cli``).
    """

    def __init__(self, path: str | Path, header: TraceHeader) -> None:
        self._file = _create(Path(path))
        self._file.write(encode_line(header.to_json()))

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: StepRecord) -> None:
        """Add a step."""
        self._file.write(
            encode_line(
                step_object(
                    record.finished,
                    record.preempted,
                    [(entry.request_id, entry.num_computed_tokens, entry.rows) for entry in record.new],
                    [(entry.request_id, entry.num_computed_tokens, entry.rows) for entry in record.resumed],
                    [(entry.request_id, entry.rows) for entry in record.appended],
                    list(
                        zip(
                            record.request_ids,
                            record.num_computed_tokens.tolist(),
                            record.num_scheduled_tokens.tolist(),
                            strict=True,
                        )
                    ),
                    record.vllm_allows,
                )
            )
        )

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


BlockIds = Sequence[Sequence[int] | IntArray]
"""Block ids per KV cache group, as engines hand them over."""


def step_object(
    finished: Iterable[str],
    preempted: Iterable[str],
    new: Iterable[tuple[str, int, BlockIds]],
    resumed: Iterable[tuple[str, int, BlockIds]],
    appended: Iterable[tuple[str, BlockIds]],
    batch: Iterable[tuple[str, int, int]],
    vllm_allows: bool,
) -> dict[str, Any]:
    """A step line as an object; what is in it may still be numpy's."""
    return {
        "finished": list(finished),
        "preempted": list(preempted),
        "new": list(new),
        "resumed": list(resumed),
        "appended": list(appended),
        "batch": list(batch),
        "vllm_allows": bool(vllm_allows),
    }


def encode_line(value: Mapping[str, Any]) -> bytes:
    """A line of a trace, with its line feed."""
    return json.dumps(value, separators=(",", ":"), default=_plain).encode("ascii") + b"\n"


def _plain(value: object) -> Any:
    """Numpy's scalars and arrays as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in a trace")


class _BrokenOffError(Exception):
    """A compressed stream that ends too early."""


class _UnreadableError(Exception):
    """A stream that cannot be decompressed, or a line that is too long."""


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """The decompressed bytes of a file, piece by piece."""
    magic = file.read(4)
    file.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return _gzip_chunks(file)
    if magic == b"\x28\xb5\x2f\xfd":
        return _zstd_chunks(file)
    return iter(lambda: file.read(_CHUNK_BYTES), b"")


def _gzip_chunks(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as stream:
        while True:
            try:
                # read1() gives what is there before it meets the end of a truncated stream.
                chunk = stream.read1(_CHUNK_BYTES)
            except EOFError as error:
                raise _BrokenOffError("truncated gzip stream") from error
            except (gzip.BadGzipFile, zlib.error) as error:
                raise _UnreadableError(f"damaged gzip stream: {_one_line(error)}") from error
            if not chunk:
                return
            yield chunk


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise _UnreadableError("zstd needs the zstandard package: pip install 'ubatch-guard[cli]'") from error
    # The stream reader of the library ends silently where a frame is cut short; the object knows its end.
    context = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    stream = context.decompressobj()
    inside = False
    while data := file.read(_ZSTD_CHUNK_BYTES):
        while data:
            try:
                chunk = stream.decompress(data)
            except zstandard.ZstdError as error:
                raise _UnreadableError(f"damaged zstd stream: {_one_line(error)}") from error
            if chunk:
                yield chunk
            inside = not stream.eof
            data = stream.unused_data
            if stream.eof:
                stream = context.decompressobj()
    if inside:
        raise _BrokenOffError("truncated zstd stream")


def _split_lines(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines without their line feed, and whether they had one: the last of a file may have none."""
    pending: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        pending.append(first)
        size += len(first)
        if size > _MAX_LINE_BYTES:
            raise _UnreadableError(f"line of more than {_MAX_LINE_BYTES} bytes")
        if rest:
            yield b"".join(pending), True
            *whole, last = rest
            for line in whole:
                yield line, True
            pending, size = [last], len(last)
    if size:
        yield b"".join(pending), False


def _create(path: Path) -> BinaryIO:
    file: Any
    if path.suffix == ".gz":
        # The time in the stream would make two equal traces differ.
        file = gzip.GzipFile(path, "wb", compresslevel=6, mtime=0)
    elif path.suffix == ".zst":
        import zstandard

        file = zstandard.ZstdCompressor(level=6).stream_writer(path.open("wb"), closefd=True)
    else:
        file = path.open("wb")
    return cast(BinaryIO, file)


def _first_duplicate(values: Iterable[str]) -> str:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    raise ValueError("no duplicate")


def _short(value: object) -> str:
    """A value in few characters of one line."""
    return reprlib.repr(value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
