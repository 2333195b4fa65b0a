"""Simulated steps against a scheduler written anew, against what a split would execute, and bad logs."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import oracle
import pytest

from ubatch_guard import reference
from ubatch_guard.engine.workloads import EXCERPT
from ubatch_guard.simulate.requests import LoggedRequest, LogOptions, RequestLog
from ubatch_guard.simulate.steps import EngineOptions, Simulation, TooLargeError
from ubatch_guard.trace import Replay
from ubatch_guard.trace.audit import AuditOptions, Auditor
from ubatch_guard.trace.format import TraceError

Batch = list[tuple[str, int, int]]


def independent_steps(requests: list[LoggedRequest], options: EngineOptions) -> list[tuple[Batch, list[str]]]:
    """Requests, computed and scheduled tokens of each step, as scheduled, and who was preempted.

    Content instead of block ids: the pool is a set of keys with the time of their last release.
    """
    size, places = options.block_size, options.num_gpu_blocks - 1
    arrivals = list(requests)
    waiting: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    held: dict[bytes, int] = {}  # published content that somebody holds: how many do
    free: OrderedDict[object, None] = OrderedDict((place, None) for place in range(places))
    now, steps = 0.0, []

    def take(job: dict[str, Any], tokens: int, hit: int = 0) -> bool:
        """Blocks for the job's next tokens, the first ``hit`` of its blocks from the cache."""
        first = len(job["held"])
        columns = -(-(job["computed"] + tokens) // size)
        cached = job["keys"][:hit]
        fresh = columns - first - hit
        if fresh > len(free) - sum(key in free for key in cached):
            return False
        for key in cached:
            free.pop(key, None)
            held[key] = held.get(key, 0) + 1
        for _ in range(fresh):
            free.popitem(last=False)
        job["held"] += [*cached, *([None] * fresh)]
        full = (job["computed"] + tokens) // size
        for column in range(job["published"], full):
            key = job["keys"][column]
            if job["held"][column] is None and key not in held and key not in free:
                job["held"][column] = key
                held[key] = 1
        job["published"] = full
        return True

    def release(job: dict[str, Any]) -> None:
        for key in reversed(job["held"]):
            if key is None:
                free[object()] = None
            else:
                held[key] -= 1
                if not held[key]:
                    del held[key]
                    free[key] = None
        job["held"], job["published"] = [], 0

    while arrivals or waiting or running:
        if not waiting and not running:
            now = max(now, arrivals[0].arrival_ms)
        while arrivals and arrivals[0].arrival_ms <= now:
            logged = arrivals.pop(0)
            waiting.append(
                {
                    "id": logged.request_id,
                    "keys": list(logged.block_keys),
                    "tokens": logged.num_prompt_tokens,
                    "left": logged.num_output_tokens,
                    "computed": 0,
                    "held": [],
                    "published": 0,
                }
            )
        budget, batch, preempted = options.max_num_batched_tokens, [], []
        place = 0
        while place < len(running) and budget:
            job = running[place]
            tokens = min(job["tokens"] - job["computed"], budget)
            while not (got := take(job, tokens)):
                last = running.pop()
                release(last)
                last["computed"] = 0
                waiting.insert(0, last)
                preempted.append(last["id"])
                if last is job:
                    break
            if not got:
                break
            batch.append((job, job["computed"], tokens))
            budget -= tokens
            place += 1
        while not preempted and waiting and budget and len(running) < options.max_num_seqs:
            job = waiting[0]
            hit = 0
            while (
                hit < (job["tokens"] - 1) // size
                and options.enable_prefix_caching
                and (job["keys"][hit] in held or job["keys"][hit] in free)
            ):
                hit += 1
            job["computed"] = hit * size
            tokens = min(job["tokens"] - job["computed"], budget)
            if not take(job, tokens, hit):
                job["computed"] = 0
                break
            running.append(waiting.pop(0))
            batch.append((job, job["computed"], tokens))
            budget -= tokens
        steps.append(([(job["id"], computed, tokens) for job, computed, tokens in batch], sorted(preempted)))
        total = sum(tokens for _, _, tokens in batch)
        for job, _, tokens in batch:
            job["computed"] += tokens
            if job["computed"] == job["tokens"]:
                job["tokens"] += 1
                job["left"] -= 1
                if job["tokens"] % size == 0:
                    job["keys"].append(f"{job['id']}:{job['tokens']}".encode())
                if not job["left"]:
                    running.remove(job)
                    release(job)
        now += options.step_ms + options.ms_per_1k_tokens * total / 1000
    return steps


def _random_requests(seed: int, block_size: int) -> list[LoggedRequest]:
    rng = Random(seed)
    trunk = [f"trunk{column}".encode() for column in range(12)]
    requests, time = [], 0.0
    for number in range(rng.randint(5, 40)):
        time += rng.choice([0.0, 0.0, 0.0, 20.0, 90.0])
        num_tokens = rng.randint(1, 12 * block_size)
        shared = rng.randint(0, 12)
        keys = [
            trunk[column] if column < shared else f"{number}.{column}".encode()
            for column in range(num_tokens // block_size)
        ]
        requests.append(LoggedRequest(f"r{number}", time, num_tokens, rng.randint(1, 9), keys))
    return requests


def _options(seed: int, *, sort_batch: bool = False, **extra: Any) -> EngineOptions:
    rng = Random(-seed)
    return EngineOptions(
        max_num_seqs=rng.choice([2, 6, 16]),
        max_num_batched_tokens=rng.choice([16, 50, 300]),
        block_size=4,
        num_gpu_blocks=rng.choice([20, 40, 400]),
        sort_batch=sort_batch,
        **extra,
    )


def test_steps_are_those_of_another_scheduler() -> None:
    preempted = hits = 0
    for seed in range(150):
        requests, options = _random_requests(seed, 4), _options(seed)
        steps = []
        for record in Simulation(requests, options):
            batch = zip(
                record.request_ids,
                record.num_computed_tokens.tolist(),
                record.num_scheduled_tokens.tolist(),
                strict=True,
            )
            steps.append((list(batch), list(record.changes.preempted)))
            hits += sum(entry.num_computed_tokens for entry in record.changes.new)
        assert steps == independent_steps(requests, options), seed
        preempted += sum(len(names) for _, names in steps)
    assert preempted > 50
    assert hits > 1000


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("sort_batch", [True, False])
def test_what_is_unsafe_is_what_a_split_would_read_too_early(sort_batch: bool, window: int | None) -> None:
    seen = {"unsafe": 0, "safe": 0, "refused": 0}
    for seed in range(40):
        options = _options(seed, sort_batch=sort_batch, sliding_window=window)
        if options.num_gpu_blocks < 40:
            continue
        simulation = Simulation(_random_requests(seed, 4), options)
        header = options.header("random")
        auditor, replay = Auditor("random", header, AuditOptions(prefill_token_threshold=0)), Replay(header)
        unsafe = 0
        for number, record in enumerate(simulation, 2):
            auditor.step(record, number)
            step = replay.step(record)
            assert record.vllm_allows == reference.vllm_allows(step, None)
            seen["refused"] += not record.vllm_allows
            if (step.num_reqs > 1 and step.num_tokens >= 32) or (
                step.num_reqs > 1 and step.num_tokens != step.num_reqs
            ):
                unsafe += step.num_tokens // 2 in oracle.unsafe_cuts(step)
        audit = auditor.result()
        assert audit.hazardous == unsafe
        assert audit.kept == audit.eligible
        seen["unsafe"] += unsafe
        seen["safe"] += audit.eligible - unsafe
    assert min(seen["safe"], seen["refused"]) > 5, seen
    # The scheduler's own order has every writer before its readers; the sort has not.
    assert (seen["unsafe"] > 5) is sort_batch, seen


def test_without_prefix_caching_nothing_is_unsafe() -> None:
    options = _options(3, enable_prefix_caching=False)
    auditor = Auditor("", options.header(""), AuditOptions(prefill_token_threshold=0))
    for number, record in enumerate(Simulation(_random_requests(3, 4), options), 2):
        auditor.step(record, number)
    audit = auditor.result()
    assert audit.eligible > 5
    assert audit.hazardous_any_cut == audit.engine_vetoed == 0


def test_a_request_that_the_pool_cannot_hold_is_refused() -> None:
    requests = [LoggedRequest("7", 0.0, 400, 1, [])]
    with pytest.raises(
        TooLargeError, match="request 7 has 401 tokens, which take 101 blocks; the pool has 19"
    ):
        list(Simulation(requests, EngineOptions(block_size=4, num_gpu_blocks=20)))


def _log(tmp_path: Path, *entries: Any) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def _read(path: Path, **options: Any) -> list[LoggedRequest]:
    with RequestLog(path, LogOptions(**options)) as log:
        return list(log)


def test_the_formats(tmp_path: Path) -> None:
    mooncake = _read(EXCERPT)
    lines = [json.loads(line) for line in EXCERPT.read_text().splitlines()]
    assert [request.num_prompt_tokens for request in mooncake] == [line["input_length"] for line in lines]
    assert [request.arrival_ms for request in mooncake] == [line["timestamp"] for line in lines]
    assert all(len(request.block_keys) == request.num_prompt_tokens // 16 for request in mooncake)
    for one, other in pairwise(mooncake):
        shared = sum(a == b for a, b in zip(one.block_keys, other.block_keys, strict=False))
        ids = [lines[int(request.request_id) - 1]["hash_ids"] for request in (one, other)]
        common = 0
        while common < min(map(len, ids)) and ids[0][common] == ids[1][common]:
            common += 1
        assert shared == min(common * 32, len(one.block_keys), len(other.block_keys))

    bailian = {"chat_id": 1, "timestamp": 1.5, "input_length": 40, "output_length": 0, "hash_ids": [5, 6, 7]}
    (request,) = _read(_log(tmp_path, bailian), block_size=32)
    assert (request.arrival_ms, request.num_prompt_tokens, request.num_output_tokens) == (1500.0, 40, 1)
    assert len(request.block_keys) == 1

    texts = [{"prompt": "a" * 70, "max_tokens": 5}, {"body": {"prompt": "a" * 64 + "b"}}, {"messages": []}]
    with pytest.raises(TraceError, match=r"log\.jsonl:3: the prompt has no tokens"):
        _read(_log(tmp_path, *texts))
    first, second = _read(_log(tmp_path, *texts[:2]))
    assert (first.num_prompt_tokens, first.num_output_tokens, second.num_output_tokens) == (18, 5, 128)
    assert first.block_keys == second.block_keys != []

    one, two, three = _read(
        _log(tmp_path, *({"prompt_token_ids": [*range(16), x, *range(20)]} for x in (1, 1, 2)))
    )
    assert one.block_keys == two.block_keys
    assert [a == b for a, b in zip(one.block_keys, three.block_keys, strict=True)] == [True, False]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "none of hash_ids, prompt_token_ids, prompt and messages"),
        ('{"input_length": 100, "hash_ids": [1, 2, 3]}', "an id stands neither for 512 tokens nor for 16"),
        ('{"input_length": -1, "hash_ids": []}', "input_length is -1"),
        ('{"input_length": 9, "hash_ids": ["x"]}', "hash_ids is"),
        ('{"prompt": 3}', "prompt is 3, not a text"),
        ('{"prompt_token_ids": [1.5]}', "prompt_token_ids is"),
        ('{"prompt_token_ids": [99999999999999999999]}', "more than 64 bits"),
        ('{"prompt": "x", "max_tokens": "many"}', "output_length is 'many'"),
        ('{"prompt": "x", "timestamp": "now"}', "timestamp is 'now'"),
        ('{"format": "ubatch-guard-steps"}', "ubatch-guard audit"),
    ],
)
def test_a_wrong_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "right"}\n' + line + "\n")
    result = _run(path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{path}:2: ")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def _run(*arguments: object, prelude: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{prelude}\nimport sys\nfrom ubatch_guard.cli import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "simulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)


def test_the_trace_that_is_kept_is_audited_alike_and_torch_is_not_needed(tmp_path: Path) -> None:
    requests = [
        {"prompt_token_ids": [group] * 900 + [number], "max_tokens": 3}
        for group in range(4)
        for number in range(6)
    ]
    path, trace = _log(tmp_path, *requests), tmp_path / "steps.jsonl.gz"
    result = _run("--json", "--trace", trace, path, prelude="import sys; sys.modules['torch'] = None")
    assert (result.returncode, result.stderr) == (0, "")
    line = json.loads(result.stdout)
    assert line["hazardous"] > 0
    assert line["cached_tokens"] > 0
    assert (line["requests"], line["finished"]) == (24, 24)
    code = "import sys; from ubatch_guard.cli import main; sys.exit(main())"
    audited = subprocess.run(
        [sys.executable, "-c", code, "audit", "--json", str(trace)],
        capture_output=True,
        text=True,
        check=True,
    )
    counts = json.loads(audited.stdout)
    same = counts.keys() - {"trace", "check_us_p50", "check_us_p99"}
    assert {key: counts[key] for key in same} == {key: line[key] for key in same}
    header = json.loads(gzip.decompress(trace.read_bytes()).splitlines()[0])
    assert header["source"] == "ubatch-guard simulate"


def test_cached_tokens_are_those_seen_before() -> None:
    """With a pool that forgets nothing and requests one after the other, a hit is what came before."""
    seen: set[bytes] = set()
    expected = 0
    requests = [
        LoggedRequest(r.request_id, number * 1e6, r.num_prompt_tokens, 1, list(r.block_keys))
        for number, r in enumerate(_read(EXCERPT))
    ]
    for request in requests:
        for column, key in enumerate(request.block_keys):
            if key not in seen or column == (request.num_prompt_tokens - 1) // 16:
                break
            expected += 16
        seen.update(request.block_keys)
    simulation = Simulation(requests, EngineOptions(num_gpu_blocks=1 << 17))
    for _ in simulation:
        pass
    assert asdict(simulation.stats)["cached_tokens"] == expected > 5000
