"""Prompts that share prefixes: what makes requests of one step read each other's blocks.

Requests arrive at a step, not at a time, so that a run repeats exactly.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from .config import CacheConfig, ModelConfig, SchedulerConfig
from .request import SamplingParams

EXCERPT = Path(__file__).parent / "data" / "mooncake-conversation-excerpt.jsonl"
"""Requests of the public Mooncake trace that ship with the package; see the README beside them."""

# Mooncake's requests are scaled down by 32, to what a CPU serves in seconds: a block of 512 tokens, which an
# id of its ``hash_ids`` stands for, becomes one of 16, and a step stands for 100 ms.
_MOONCAKE_BLOCK = 512
_SCALE = 32
_MS_PER_STEP = 100


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request and the step it arrives at."""

    req_id: str
    arrival_step: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and the engine they are meant for."""

    name: str
    requests: list[WorkloadRequest]
    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=lambda: CacheConfig(num_blocks=2048))
    scheduler_config: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_num_batched_tokens=2048)
    )

    def of_rank(self, rank: int, size: int) -> Workload:
        """Every ``size``-th request, from the ``rank``-th on."""
        return replace(self, requests=self.requests[rank::size])


def fewshot(vocab_size: int, seed: int) -> Workload:
    """One preamble of examples before every question: the first request writes what the rest read."""
    rng = random.Random(seed)
    preamble = _tokens(rng, vocab_size, 672)
    return Workload(
        "fewshot",
        [
            WorkloadRequest(
                f"fewshot-{i}",
                0 if i < 24 else 4,
                preamble + _tokens(rng, vocab_size, rng.randint(20, 140)),
                SamplingParams(max_tokens=8),
            )
            for i in range(40)
        ],
    )


def grpo(vocab_size: int, seed: int) -> Workload:
    """Rollouts of reinforcement learning: groups of samples from identical prompts, wave after wave."""
    rng = random.Random(seed)
    requests = []
    for group in range(6):
        prompt = _tokens(rng, vocab_size, rng.randint(520, 640))
        requests += [
            WorkloadRequest(
                f"grpo-{group}-{sample}",
                group // 3 * 10,
                prompt,
                SamplingParams(max_tokens=10, temperature=0.7, seed=rng.randrange(2**31)),
            )
            for sample in range(8)
        ]
    return Workload("grpo", requests)


def rag(vocab_size: int, seed: int) -> Workload:
    """Questions about a few documents, behind one system prompt; every other layer has a sliding window."""
    rng = random.Random(seed)
    system = _tokens(rng, vocab_size, 48)
    documents = [_tokens(rng, vocab_size, rng.randint(16, 24) * 16) for _ in range(4)]
    requests = []
    for i in range(36):
        first, second = rng.sample(documents, 2)
        question = _tokens(rng, vocab_size, rng.randint(10, 60))
        requests.append(
            WorkloadRequest(
                f"rag-{i}", i // 12 * 4, system + first + second + question, SamplingParams(max_tokens=8)
            )
        )
    model = ModelConfig(sliding_window=128, sliding_window_layers=(1,))
    scheduler = SchedulerConfig(max_num_batched_tokens=4096)
    return Workload("rag", requests, model_config=model, scheduler_config=scheduler)


def independent(vocab_size: int, seed: int) -> Workload:
    """Prompts that share nothing: no hazard, so that what is timed is the same work under every rule."""
    rng = random.Random(seed)
    requests = [
        WorkloadRequest(
            f"independent-{i}",
            i // 24 * 6,
            _tokens(rng, vocab_size, rng.randint(40, 120)),
            SamplingParams(max_tokens=16),
        )
        for i in range(72)
    ]
    return Workload("independent", requests)


def mooncake(file: Path, vocab_size: int, seed: int, limit: int = 40) -> Workload:
    """The first requests of a file in Mooncake's format, scaled down; equal hash ids become equal tokens.

    Args:
        file: One JSON object a line with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and
            ``hash_ids``; ``.gz``: compressed.
        vocab_size: Tokens to draw from.
        seed: Of the drawing.
        limit: Requests to take.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is no such request.
    """
    requests = []
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        for number, line in zip(range(limit), lines, strict=False):
            try:
                entry = json.loads(line)
                arrival = int(entry["timestamp"]) // _MS_PER_STEP
                prompt: list[int] = []
                for hash_id in entry["hash_ids"]:
                    block = random.Random(f"{seed} {hash_id}")
                    prompt += _tokens(block, vocab_size, _MOONCAKE_BLOCK // _SCALE)
                prompt = prompt[: max(1, int(entry["input_length"]) // _SCALE)]
                params = SamplingParams(max_tokens=max(1, int(entry["output_length"]) // _SCALE))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file}, line {number + 1}: not a request in Mooncake's format") from error
            requests.append(WorkloadRequest(f"request-{number}", arrival, prompt, params))
    if not requests:
        raise ValueError(f"{file} holds no requests")
    return Workload("requests", requests)


SYNTHETIC: dict[str, Callable[[int, int], Workload]] = {"fewshot": fewshot, "grpo": grpo, "rag": rag}
"""The workloads that need no file: functions of the size of the vocabulary and a seed."""


def _tokens(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return rng.choices(range(vocab_size), k=count)
