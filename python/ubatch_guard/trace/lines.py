"""The bytes of a trace: plain text, gzip or zstd, line by line, with a bound on each line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ubatch_guard.trace.format import MAX_LINE_BYTES, MAX_LINE_CONTAINERS, one_line

_CHUNK_BYTES = 1 << 20
_ZSTD_CHUNK_BYTES = 1 << 8
"""Compressed bytes at a time: zstd gives out all that they hold, up to 32,768 times as much."""


class UnreadableError(Exception):
    """Bytes that cannot be decompressed, or a line that passes a bound."""


class BrokenOffError(UnreadableError):
    """A compressed stream that ends too early."""


class Source:
    """A file that can look at its first bytes without seeking, which a pipe cannot."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.head = file.read(4)
        self._ahead = self.head
        self.position = 0
        """Bytes handed out."""

    def read(self, size: int = -1) -> bytes:
        """The next bytes, at most ``size`` of them."""
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
        else:
            data = self._file.read(size)
        self.position += len(data)
        return data


def split_lines(source: Source) -> Iterator[tuple[bytes, bool]]:
    """Lines without their line feed, and whether they had one: the last of a file may have none.

    Raises:
        UnreadableError: See there.
        OSError: The file cannot be read.
    """
    pending: list[bytes] = []
    size = 0
    for chunk in _chunks(source):
        first, *rest = chunk.split(b"\n")
        pending.append(first)
        size += len(first)
        if size > MAX_LINE_BYTES:
            raise UnreadableError(f"line of more than {MAX_LINE_BYTES} bytes")
        if rest:
            yield b"".join(pending), True
            *whole, last = rest
            for line in whole:
                yield line, True
            pending, size = [last], len(last)
    if size:
        yield b"".join(pending), False


def check_line(line: bytes) -> None:
    """Check a line's bounds, before anything is made of it.

    Raises:
        UnreadableError: It passes one.
    """
    if len(line) > MAX_LINE_BYTES:
        raise UnreadableError(f"line of more than {MAX_LINE_BYTES} bytes")
    if line.count(b"[") + line.count(b"{") > MAX_LINE_CONTAINERS:
        raise UnreadableError(f"line of more than {MAX_LINE_CONTAINERS} lists and objects")


def create(path: Path) -> BinaryIO:
    """A file to write, compressed after its name: ``.gz`` with gzip, ``.zst`` with zstd, others not."""
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


def _chunks(source: Source) -> Iterator[bytes]:
    """The decompressed bytes, piece by piece; a piece has at most a few megabytes."""
    if source.head[:2] == b"\x1f\x8b":
        return _gzip_chunks(source)
    if source.head == b"\x28\xb5\x2f\xfd":
        return _zstd_chunks(source)
    return iter(lambda: source.read(_CHUNK_BYTES), b"")


def _gzip_chunks(source: Source) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=cast(BinaryIO, source), mode="rb") as stream:
        while True:
            try:
                # read1() gives what is there before it meets the end of a truncated stream.
                chunk = stream.read1(_CHUNK_BYTES)
            except EOFError as error:
                raise BrokenOffError("truncated gzip stream") from error
            except (gzip.BadGzipFile, zlib.error) as error:
                raise UnreadableError(f"damaged gzip stream: {one_line(error)}") from error
            if not chunk:
                return
            yield chunk


def _zstd_chunks(source: Source) -> Iterator[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise UnreadableError("zstd needs the zstandard package: pip install 'ubatch-guard[cli]'") from error
    # The stream reader of the library ends silently where a frame is cut short; the object knows its end.
    context = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    stream = context.decompressobj()
    inside = False
    while data := source.read(_ZSTD_CHUNK_BYTES):
        while data:
            try:
                chunk = stream.decompress(data)
            except zstandard.ZstdError as error:
                raise UnreadableError(f"damaged zstd stream: {one_line(error)}") from error
            if chunk:
                yield chunk
            inside = not stream.eof
            data = stream.unused_data
            if stream.eof:
                stream = context.decompressobj()
    if inside:
        raise BrokenOffError("truncated zstd stream")
