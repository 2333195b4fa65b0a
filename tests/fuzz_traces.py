"""A fuzzer for traces: whatever stands in a file, reader and audit answer with counts or a TraceError.

``python tests/fuzz_traces.py --seconds 60 [--seed N]`` mutates the traces of ``tests/traces`` and one of its
own, as JSON and as bytes, plain and compressed. It stops at the first that ends otherwise, with the example's
number and status 1. `run` does a given number of examples, the same ones for the same seed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict
from itertools import accumulate, takewhile
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from ubatch_guard.step import Policy
from ubatch_guard.trace import TraceError
from ubatch_guard.trace.audit import AuditOptions, audit_trace

TRACES = Path(__file__).parent / "traces"
MAX_MEGABYTES = 1200
"""That the process may grow by: a line of 16 MiB takes 350, a mirror of 2^26 blocks up to 805."""
_SEED_BYTES = 6000
_ODD_VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 63, 64, 2**16, 2**26, 2**31 - 1, 2**31, 2**64, 2**70, 10**4000),
    *(1.5, -0.0, 1e308, float("nan"), float("inf"), "", "a", "\ud800", "\0", "x" * 1000),
    *([], [[]], [[], []], {}, [0], [1, 2], ["a", 0, [[1]]], [["a", 0, [[1]]]], [[["a"]]], {"a": {}}),
]
_ODD_BYTES = [
    b"",
    b"\n",
    b"\0",
    b"\xff",
    b"[" * 3000,
    b"{",
    b"}",
    b'"',
    b"9" * 5000,
    b"\xed\xa0\x80",
    b"-",
    b" " * 99,
]

_SESSION: list[dict[str, Any]] = [
    {
        "format": "ubatch-guard-steps",
        "version": 2,
        "block_sizes": [4, 2],
        "sliding_windows": [None, 3],
        "num_blocks": 12,
        "decode_threshold": None,
        "decode_query_len": 2,
        "num_ubatches": 3,
    },
    {
        "finished": [],
        "preempted": [],
        "new": [["r", 4, [[1, 2], [3, 4, 5]]], ["w", 0, [[1, 6], [3, 4, 7, 8]]]],
        "resumed": [],
        "appended": [],
        "batch": [["r", 4, 2], ["w", 0, 8]],
        "vllm_allows": True,
        "cuts": [3, 6],
        "ranks_agreed": True,
    },
    {
        "finished": [],
        "preempted": ["r"],
        "new": [["w", 8, [[1, 6, 9], [3, 4, 7, 8, 9]]]],
        "resumed": [],
        "appended": [["w", [[], [10]]]],
        "batch": [["w", 8, 2]],
        "vllm_allows": False,
        "set_back": ["w"],
        "cuts": [],
        "ranks_agreed": False,
    },
    {
        "finished": [],
        "preempted": [],
        "new": [],
        "resumed": [["r", 4, [[1, 2], [3, 4, 5]]]],
        "appended": [],
        "batch": [["r", 4, 2], ["w", 8, 2]],
        "vllm_allows": True,
    },
]
"""What version 2 adds: a session that comes again, a set-back, cuts."""


class FoundError(Exception):
    """Something that must not be; the message says how to see it again."""


def corpus() -> list[list[dict[str, Any]]]:
    """The traces that are mutated: the first lines of those that begin with short ones."""
    traces = [_SESSION]
    for path in sorted(TRACES.rglob("*.jsonl.gz")):
        lines = gzip.decompress(path.read_bytes()).splitlines()
        sizes = accumulate(map(len, lines))
        short = takewhile(lambda size: size <= _SEED_BYTES, sizes)
        traces.append([json.loads(line) for line, _ in zip(lines, short, strict=False)])
    return [trace for trace in traces if len(trace) > 1]


def run(seed: int, examples: int | None = None, seconds: float | None = None) -> Counter[str]:
    """Try examples until either bound is met; how many were counted and how many refused.

    Raises:
        FoundError: At the first example that ends otherwise, or takes too much memory.
    """
    seeds = corpus()
    outcomes: Counter[str] = Counter()
    began, before = time.monotonic(), _megabytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        number = 0
        while (examples is None or number < examples) and (
            seconds is None or time.monotonic() - began < seconds
        ):
            random = Random(f"{seed}/{number}")
            path.write_bytes(_example(random, seeds))
            outcomes[_outcome(path, random, f"seed {seed}, example {number}")] += 1
            if _megabytes() - before > MAX_MEGABYTES:
                raise FoundError(f"seed {seed}, example {number}: more than {MAX_MEGABYTES} MB")
            number += 1
    return outcomes


def _outcome(path: Path, random: Random, name: str) -> str:
    """``counted`` or ``refused``; core and reference must agree on it."""
    tokens = random.choice([0, 1, 32])
    policy = random.choice([Policy.VETO, Policy.REORDER])
    partial = random.random() < 0.3
    answers = []
    for slow in (False, True):
        options = AuditOptions(policy, tokens, tokens, reference=slow, partial=partial)
        try:
            answer: Any = asdict(audit_trace(path, options))
            del answer["check_us_p50"], answer["check_us_p99"]
        except TraceError as error:
            answer = error.line
            if "\n" in error.reason:
                raise FoundError(f"{name}: a reason of several lines: {error.reason!r}") from error
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise FoundError(f"{name}: {type(error).__name__}: {error}") from error
        answers.append(answer)
    if answers[0] != answers[1]:
        raise FoundError(f"{name}: the core says {answers[0]}, the reference {answers[1]}")
    return "counted" if isinstance(answers[0], dict) else "refused"


def _example(random: Random, seeds: list[list[dict[str, Any]]]) -> bytes:
    lines = deepcopy(random.choice(seeds))
    for _ in range(random.choice([0, 1, 1, 2, 5])):
        _mutate(random, lines)
    text = b"".join(_encoded(line) + b"\n" for line in lines)
    if random.random() < 0.3:
        text = _damaged(random, text)
    compress = random.choice([None, None, None, gzip.compress, zstandard.compress])
    if compress is not None:
        text = compress(text)
        if random.random() < 0.5:
            text = _damaged(random, text)
    return text


def _encoded(line: Any) -> bytes:
    try:
        return json.dumps(line).encode()
    except ValueError:  # a number of more digits than Python writes
        return b'{"finished": ' + b"9" * 5000 + b"}"


def _mutate(random: Random, lines: list[Any]) -> None:
    places = list(_places(lines))
    if not places:
        return
    container, key = random.choice(places)
    kind = random.random()
    if kind < 0.15:
        del container[key]
    elif kind < 0.5:
        container[key] = deepcopy(random.choice(_ODD_VALUES))
    elif kind < 0.65 and type(container[key]) is int:
        container[key] += random.choice([-1, 1, 2, 16])
    elif kind < 0.85:
        other, place = random.choice(places)
        # Copied, here and elsewhere, so that no value comes to hold itself.
        container[key] = deepcopy(other[place])
    elif isinstance(container, list):
        container.insert(random.randrange(len(container) + 1), deepcopy(container[key]))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value: container and key."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _damaged(random: Random, data: bytes) -> bytes:
    for _ in range(random.choice([1, 1, 4])):
        start = random.randrange(len(data) + 1)
        kind = random.random()
        if kind < 0.2:
            data = data[:start]
        elif kind < 0.5:
            data = data[:start] + bytes([random.randrange(256)]) + data[start + 1 :]
        elif kind < 0.8:
            data = data[:start] + random.choice(_ODD_BYTES) + data[start:]
        else:
            end = min(len(data), start + random.randrange(200))
            data = data[:start] + data[end:]
    return data


def _megabytes() -> int:
    """The most memory that the process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=zlib.crc32(str(time.time()).encode()))
    args = parser.parse_args()
    try:
        outcomes = run(args.seed, seconds=args.seconds)
    except FoundError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"seed {args.seed}: {outcomes.total()} examples, {dict(outcomes)}, at most {_megabytes()} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
