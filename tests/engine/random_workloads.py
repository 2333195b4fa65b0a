"""Small random workloads: everything that decides about a hazard is drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import replace

from ubatch_guard.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from ubatch_guard.engine.request import SamplingParams
from ubatch_guard.engine.workloads import WorkloadRequest

TINY = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=2,
    num_experts_per_tok=1,
)
"""One KV cache group."""


def tiny_hybrid(window: int) -> ModelConfig:
    """Two KV cache groups, the second with a sliding window."""
    return replace(TINY, sliding_window=window, sliding_window_layers=(1,))


DENSE = replace(TINY, model_type="llama", num_experts=0, num_experts_per_tok=0)
"""No experts, so no exchange at which microbatches hand over: each runs through all layers in one go."""


def random_workload(seed: int) -> tuple[EngineConfig, list[WorkloadRequest]]:
    """An engine and its requests. Prompts are cut from a few texts, so that prefixes are shared."""
    rng = random.Random(seed)
    block_size = rng.choice((2, 4))
    hybrid = rng.random() < 0.5
    longest = 40
    texts = [rng.choices(range(32), k=longest) for _ in range(rng.randint(1, 3))]
    requests = []
    arrival = 0
    for i in range(rng.randint(3, 8)):
        text = rng.choice(texts)
        prompt = text[: rng.randint(2, 26)] + rng.choices(range(32), k=rng.randint(0, 6))
        if i and rng.random() < 0.3:
            prompt = requests[-1].prompt_token_ids  # a group of identical prompts
        params = SamplingParams(
            max_tokens=rng.randint(1, 4), temperature=rng.choice((0.0, 0.8)), seed=rng.randrange(2**31)
        )
        requests.append(WorkloadRequest(f"r{i}", arrival, prompt, params))
        arrival += rng.choice((0, 0, 0, 1))
    needed = (2 if hybrid else 1) * -(-longest // block_size) + 2
    config = EngineConfig(
        model_config=tiny_hybrid(rng.choice((3, 5, 9))) if hybrid else rng.choice((TINY, TINY, DENSE)),
        cache_config=CacheConfig(block_size, num_blocks=needed + rng.choice((0, 0, 10, 100))),
        scheduler_config=SchedulerConfig(rng.randint(3, 8), rng.choice((16, 32, 64)), longest),
        parallel_config=ParallelConfig(
            num_ubatches=rng.choice((2, 3)),
            dbo_prefill_token_threshold=rng.choice((2, 6)),
            dbo_decode_token_threshold=rng.choice((2, 4)),
        ),
        reorder_batch_threshold=rng.choice((None, 1, 4, 16)),
        sanitize=True,
    )
    return config, requests
