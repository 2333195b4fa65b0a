"""The workload of the data-parallel tests: every rank shares prefixes, and some run dry early."""

from __future__ import annotations

import random

from ubatch_guard.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from ubatch_guard.engine.request import SamplingParams
from ubatch_guard.engine.workloads import WorkloadRequest


def parallel_workload() -> tuple[EngineConfig, list[WorkloadRequest]]:
    """Requests i, i + 4, i + 8 ... share a prefix, so that each of up to 4 ranks has a hazard of its own."""
    rng = random.Random(0)
    texts = [rng.choices(range(64), k=24) for _ in range(4)]
    requests = []
    for i in range(24):
        prompt = texts[i % 4] + rng.choices(range(64), k=rng.randint(1, 9))
        # The last rank of 2 and of 4 has the longest answers: the others idle at the end.
        params = SamplingParams(max_tokens=10 if i % 4 == 3 else rng.randint(1, 4))
        requests.append(WorkloadRequest(f"r{i}", i // 12, prompt, params))
    model = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
    )
    config = EngineConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=4, num_blocks=256),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=256, max_model_len=64),
        parallel_config=ParallelConfig(
            num_ubatches=2, dbo_prefill_token_threshold=8, dbo_decode_token_threshold=2
        ),
        reorder_batch_threshold=1,
        sanitize=True,
    )
    return config, requests
