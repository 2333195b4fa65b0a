"""Reads logs of requests: Mooncake's and Bailian's format, and JSON lines of prompts.

A prompt becomes one key for each full KV block: equal keys mean equal prefixes, as an engine's prefix cache
takes them. Lines are read one at a time, so that a log of any length does.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ubatch_guard.trace.format import TraceError, one_line, short
from ubatch_guard.trace.lines import Source, UnreadableError, check_line, split_lines

HASH_BLOCK_SIZES = (512, 16)
"""Tokens that a hash id stands for: in Mooncake's traces, in Bailian's."""
CHARACTERS_PER_TOKEN = 4
"""Of a prompt given as text."""
MAX_TOKENS = 1 << 24
"""Of a prompt, and of an output."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How a log is to be read.

    Attributes:
        block_size: Tokens of a KV block.
        hash_block_size: Tokens that an id of ``hash_ids`` stands for; None: found out from the first request.
        timestamp_unit_ms: Milliseconds of a unit of ``timestamp``; None: 1 where the first one is an integer
            (Mooncake), 1,000 where it is not (Bailian).
        output_length: Tokens generated for a request that does not say.
    """

    block_size: int = 16
    hash_block_size: int | None = None
    timestamp_unit_ms: float | None = None
    output_length: int = 128


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request of a log.

    Attributes:
        request_id: The line it stands in, as text.
        arrival_ms: When it arrives, in milliseconds; 0 where the log has no times.
        num_prompt_tokens: Length of its prompt, at least 1.
        num_output_tokens: Tokens to generate, at least 1.
        block_keys: A key for each full block of the prompt.
    """

    request_id: str
    arrival_ms: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_keys: list[bytes]


class _WrongError(ValueError):
    """What is wrong with a line, in words."""


class RequestLog:
    """Reads a log, a request at a time; ``with RequestLog(path, options) as log: for request in log: ...``.

    Args:
        path: Plain text, gzip or zstd.
        options: How to read it.

    Raises:
        TraceError: On construction and while iterating: file, line, and what is wrong.
    """

    def __init__(self, path: str | Path, options: LogOptions) -> None:
        self.path = str(path)
        self.line = 0
        """Number of the line read last, from 1."""
        self._options = options
        self._hash_block_size = options.hash_block_size
        self._unit_ms = options.timestamp_unit_ms
        self._last_ms = -math.inf
        try:
            self._file = Path(path).open("rb")  # noqa: SIM115 - closed by close()
        except (OSError, ValueError) as error:
            raise self._error(getattr(error, "strerror", None) or one_line(error)) from error
        try:
            self._source = Source(self._file)
        except OSError as error:
            self._file.close()
            raise self._error(error.strerror or str(error)) from error

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def tell(self) -> int:
        """Bytes of the file read so far, compressed as they stand there."""
        return self._source.position

    def __iter__(self) -> Iterator[LoggedRequest]:
        lines = split_lines(self._source)
        while True:
            self.line += 1
            try:
                text, _ = next(lines)
                check_line(text)
                if not text.strip():
                    continue
                yield self._request(json.loads(text))
            except StopIteration:
                self.line -= 1
                return
            except (UnreadableError, _WrongError) as error:
                raise self._error(str(error)) from error
            except OSError as error:
                raise self._error(error.strerror or str(error)) from error
            except (ValueError, RecursionError) as error:
                raise self._error(f"not JSON: {one_line(error)}") from error

    def _error(self, reason: str) -> TraceError:
        return TraceError(self.path, self.line, reason)

    def _request(self, entry: Any) -> LoggedRequest:
        if not isinstance(entry, dict):
            raise _WrongError(f"not a JSON object: {short(entry)}")
        if isinstance(entry.get("body"), dict):  # a line of a file for OpenAI's batch interface
            entry = entry["body"]
        if entry.get("format") == "ubatch-guard-steps":
            raise _WrongError("a trace of steps, not a log of requests; try: ubatch-guard audit")
        if "hash_ids" in entry or "input_length" in entry:
            num_tokens, keys = self._hashed_prompt(entry)
        elif "prompt_token_ids" in entry:
            num_tokens, keys = self._token_prompt(_integers(entry, "prompt_token_ids"))
        elif "prompt" in entry or "messages" in entry:
            num_tokens, keys = self._text_prompt(_text(entry))
        else:
            raise _WrongError("none of hash_ids, prompt_token_ids, prompt and messages is there")
        output = next(
            (entry[key] for key in ("output_length", "max_tokens") if entry.get(key) is not None), None
        )
        if output is None:
            output = self._options.output_length
        return LoggedRequest(
            str(self.line),
            self._arrival_ms(entry),
            _count("the prompt", num_tokens),
            # A request that logged no output has computed its prompt all the same.
            max(1, _count("output_length", output)),
            keys,
        )

    def _arrival_ms(self, entry: dict[str, Any]) -> float:
        time = entry.get("timestamp", 0)
        if isinstance(time, bool) or not isinstance(time, int | float) or not math.isfinite(time):
            raise _WrongError(f"timestamp is {short(time)}, not a number")
        if self._unit_ms is None:
            self._unit_ms = 1.0 if isinstance(time, int) and "chat_id" not in entry else 1000.0
        # Those that stand out of turn arrive with the one before them: the log is not sorted as a whole.
        self._last_ms = max(self._last_ms, time * self._unit_ms)
        return self._last_ms

    def _hashed_prompt(self, entry: dict[str, Any]) -> tuple[int, list[bytes]]:
        num_tokens = _count("input_length", entry.get("input_length"))
        ids = _integers(entry, "hash_ids")
        if self._hash_block_size is None:
            fitting = [size for size in HASH_BLOCK_SIZES if len(ids) == -(-num_tokens // size)]
            if not fitting:
                raise _WrongError(
                    f"{len(ids)} hash_ids for input_length {num_tokens}: an id stands neither for 512 tokens "
                    "nor for 16; see --hash-block-size"
                )
            self._hash_block_size = fitting[0]
        size, block_size = self._hash_block_size, self._options.block_size
        if len(ids) * size < num_tokens:
            raise _WrongError(
                f"{len(ids)} hash_ids of {size} tokens are too few for input_length {num_tokens}; see "
                "--hash-block-size"
            )
        if size % block_size and block_size % size:
            raise _WrongError(f"blocks of {block_size} tokens do not fit into hash blocks of {size}")
        keys: list[bytes] = []
        chain = b""
        blocks_per_id, ids_per_block = size // block_size, block_size // size
        num_blocks = num_tokens // block_size
        for index, hash_id in enumerate(ids):
            if len(keys) >= num_blocks:
                break
            chain = blake2b(chain + b"%d" % hash_id, digest_size=16).digest()
            if blocks_per_id:
                keys.extend(chain + b"%d" % part for part in range(blocks_per_id))
            elif (index + 1) % ids_per_block == 0:
                keys.append(chain)
        del keys[num_blocks:]
        return num_tokens, keys

    def _token_prompt(self, token_ids: Sequence[int]) -> tuple[int, list[bytes]]:
        try:
            tokens = array("q", token_ids)
        except OverflowError as error:
            raise _WrongError("prompt_token_ids holds an integer of more than 64 bits") from error
        return len(tokens), _chained(tokens.tobytes(), self._options.block_size * tokens.itemsize)

    def _text_prompt(self, text: str) -> tuple[int, list[bytes]]:
        # Four bytes a character, so that a block has the same number of bytes whatever is in it.
        data = text.encode("utf-32-le", "surrogatepass")
        block_bytes = self._options.block_size * CHARACTERS_PER_TOKEN * 4
        return -(-len(text) // CHARACTERS_PER_TOKEN), _chained(data, block_bytes)


def _chained(data: bytes, block_bytes: int) -> list[bytes]:
    keys: list[bytes] = []
    chain = b""
    for end in range(block_bytes, len(data) + 1, block_bytes):
        chain = blake2b(chain + data[end - block_bytes : end], digest_size=16).digest()
        keys.append(chain)
    return keys


def _count(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise _WrongError(f"{what} is {short(value)}, not a number of tokens up to {MAX_TOKENS:,}")
    if value == 0 and what != "output_length":
        raise _WrongError(f"{what} has no tokens")
    return value


def _integers(entry: dict[str, Any], key: str) -> list[int]:
    value = entry.get(key)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise _WrongError(f"{key} is {short(value)}, not a list of integers")
    return value


def _text(entry: dict[str, Any]) -> str:
    """The prompt as a text: what an engine would send through its chat template, without the template."""
    if "messages" not in entry:
        if not isinstance(entry["prompt"], str):
            raise _WrongError(f"prompt is {short(entry['prompt'])}, not a text")
        return entry["prompt"]
    messages = entry["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _WrongError(f"messages is {short(messages)}, not a list of objects")
    return "".join(f"{message.get('role')}\n{message.get('content')}\n" for message in messages)
