"""The trace format ``ubatch-guard-steps``: its versions, its bounds, and the header line."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ubatch_guard.step import KVCacheGroup

FORMAT = "ubatch-guard-steps"
VERSION = 2
"""What is written; version 1 is read as well."""
NULL_BLOCK = 0
"""The format knows vLLM's null block only."""

MAX_LINE_BYTES = 1 << 24
"""Of a line, decompressed. A step that admits 64 requests of 128k tokens takes 4 MB."""
MAX_LINE_CONTAINERS = 1 << 18
"""Opening brackets in a line: an empty list takes 30 times its text in memory."""
MAX_GROUPS = 64
MAX_BLOCKS = 1 << 26
"""Blocks of all groups' pools together."""
MAX_ROW_ENTRIES = 1 << 26
"""Block ids in the rows of all live requests together."""
MAX_UBATCHES = 1 << 10
INT32_MAX = int(np.iinfo(np.int32).max)


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
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.reason}"


class MalformedError(ValueError):
    """A line that is not as the format says; the message says what is wrong, in one line."""


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
        attention_chunk_sizes: Chunk of chunked local attention in tokens or None, per KV cache group; None:
            no group has one.
        decode_query_len: Tokens of a decode with all of its drafts: 1 + number of draft tokens. Version 1
            cannot say it.
        version: Of the format.
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
    decode_query_len: int = 1
    version: int = VERSION

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

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> TraceHeader:
        """The header of a header line.

        Raises:
            MalformedError: It is none, or passes a bound of the format.
        """
        if line.get("format") != FORMAT:
            raise MalformedError(f"format is {short(line.get('format'))}, not {FORMAT!r}")
        version = line.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise MalformedError(f"version is {short(version)}; known are 1 to {VERSION}")
        block_sizes = get(line, "block_sizes", list)
        num_groups = len(block_sizes)
        if not 1 <= num_groups <= MAX_GROUPS:
            what = f"has {num_groups} entries, more than {MAX_GROUPS}" if block_sizes else "is empty"
            raise MalformedError(f"block_sizes {what}")
        for size in block_sizes:
            check_int("block_sizes", size, 1)
        num_blocks = check_int("num_blocks", get(line, "num_blocks", int), 1)
        if num_blocks * num_groups > MAX_BLOCKS:
            raise MalformedError(f"num_blocks: {num_groups} pools of {num_blocks}, more than {MAX_BLOCKS}")
        if "decode_threshold" not in line:
            raise MalformedError("key 'decode_threshold' is missing")
        windows = _optional_sizes(line, "sliding_windows", num_groups)
        chunks = (
            None
            if line.get("attention_chunk_sizes") is None
            else _optional_sizes(line, "attention_chunk_sizes", num_groups)
        )
        if any(window and chunk for window, chunk in zip(windows, chunks or (), strict=False)):
            raise MalformedError("a group has a sliding window and an attention chunk")
        options = line.get("options", {})
        return cls(
            block_sizes=tuple(block_sizes),
            sliding_windows=windows,
            num_blocks=num_blocks,
            decode_threshold=_optional_int(line, "decode_threshold"),
            num_ubatches=check_int("num_ubatches", get(line, "num_ubatches", int), 2, MAX_UBATCHES),
            max_num_batched_tokens=_optional_int(line, "max_num_batched_tokens"),
            workload=str(line.get("workload", "")),
            options=options if isinstance(options, dict) else {"options": options},
            source=str(line.get("source", "")),
            attention_chunk_sizes=chunks,
            decode_query_len=1
            if version == 1
            else check_int("decode_query_len", get(line, "decode_query_len", int), 1),
            version=version,
        )

    def to_json(self) -> dict[str, Any]:
        """The header line as an object."""
        line: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
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
        if self.version > 1:
            line["decode_query_len"] = self.decode_query_len
        if self.attention_chunk_sizes is not None:
            line["attention_chunk_sizes"] = list(self.attention_chunk_sizes)
        return line


def get(line: Mapping[str, Any], key: str, kind: type) -> Any:
    """The value of a key that must be there and of a type (bool is no int here)."""
    if key not in line:
        raise MalformedError(f"key {key!r} is missing")
    value = line[key]
    if type(value) is not kind:
        raise MalformedError(f"{key} is {short(value)}, not of type {kind.__name__}")
    return value


def check_int(what: str, value: object, least: int, most: int = INT32_MAX) -> int:
    """``value``, which must be an integer in a range."""
    if type(value) is not int or not least <= value <= most:
        raise MalformedError(f"{what}: {short(value)} is not an integer in {least}..{most}")
    return value


def short(value: object) -> str:
    """A value in few characters of one line."""
    return reprlib.repr(value)


def one_line(error: BaseException) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _optional_int(line: Mapping[str, Any], key: str) -> int | None:
    value = line.get(key)
    return None if value is None else check_int(key, value, 0)


def _optional_sizes(line: Mapping[str, Any], key: str, length: int) -> tuple[int | None, ...]:
    sizes = get(line, key, list)
    if len(sizes) != length:
        raise MalformedError(f"{key} has {len(sizes)} entries for {length} groups")
    return tuple(None if size is None else check_int(key, size, 1) for size in sizes)
