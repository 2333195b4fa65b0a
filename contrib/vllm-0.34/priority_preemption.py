"""vLLM: a request preempted in the step that scheduled it resumes on KV that nobody has written.

    VLLM_TARGET_DEVICE=cpu python priority_preemption.py

Drives vLLM's own scheduler for a few steps, without a model and without a GPU. Exit status 1 and a line per
wrong read while the fault is there, 0 without it. See priority-preemption.md.
"""

import json
import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import torch
import vllm
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
CHUNK = 8
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}


def make_scheduler(num_blocks: int, **scheduler_config: Any) -> Scheduler:
    """A scheduler without an engine; one of the ``num_blocks`` is the null block."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(MODEL, file)
        model_config = ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=64, dtype="float32")
    vllm_config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_model_len=64,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
            **scheduler_config,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
    )
    # What the platform may have changed, and what a profiling run would have found.
    vllm_config.cache_config.block_size = BLOCK_SIZE
    vllm_config.cache_config.enable_prefix_caching = True
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    attention = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    init_none_hash(sha256)
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def add_request(
    scheduler: Scheduler, name: str, prompt: list[int], priority: int = 0, max_tokens: int = 1
) -> None:
    """A lower number is a higher priority."""
    scheduler.add_request(
        Request(
            name,
            prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            priority=priority,
            arrival_time=float(priority),
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
    )


def main() -> int:
    """Follow seven steps slot by slot."""
    print("vllm", vllm.__version__)
    scheduler = make_scheduler(
        num_blocks=8,
        policy="priority",
        max_num_batched_tokens=2 * CHUNK,
        long_prefill_token_threshold=CHUNK,
    )
    slots: dict[tuple[int, int], list[int]] = {}  # (block, offset): the tokens its KV was computed for
    rows: dict[str, list[int]] = {}  # request: its blocks
    num_wrong = 0

    # Releases differ in how much of a lone prompt they take at once. Here its first chunk is like the others.
    scheduler.max_num_scheduled_tokens = CHUNK
    add_request(scheduler, "long", list(range(100, 127)), priority=1, max_tokens=1)
    for step in range(7):
        if step == 1:
            scheduler.max_num_scheduled_tokens = 2 * CHUNK
            add_request(scheduler, "urgent", [1, 2, 3, 4], priority=0, max_tokens=2)
        output = scheduler.schedule()
        starts = {}
        for new in output.scheduled_new_reqs:
            rows[new.req_id], starts[new.req_id] = list(new.block_ids[0]), new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", ())  # before 0.34
        for name, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            rows[name] = ([] if name in resumed else rows[name]) + list(blocks[0] if blocks else [])
            starts[name] = start
        preempted = f", preempted: {sorted(output.preempted_req_ids)}" if output.preempted_req_ids else ""
        print(f"step {step}: {dict(output.num_scheduled_tokens)} from {starts}{preempted}")

        tokens = {name: list(scheduler.requests[name].all_token_ids) for name in output.num_scheduled_tokens}
        where = {
            name: [(block, offset) for block in rows[name] for offset in range(BLOCK_SIZE)] for name in tokens
        }
        for name, count in output.num_scheduled_tokens.items():
            for position in range(starts[name], starts[name] + count):
                slots[where[name][position]] = tokens[name][: position + 1]
        for name in tokens:
            wrong = [p for p in range(starts[name]) if slots.get(where[name][p]) != tokens[name][: p + 1]]
            if wrong:
                blocks = sorted({where[name][position][0] for position in wrong})
                print(f"  WRONG: {name} reads positions {wrong}, in blocks {blocks}: not written for them")
            num_wrong += len(wrong)

        sampled = [
            [7] if starts[name] + count == len(tokens[name]) else []
            for name, count in output.num_scheduled_tokens.items()
        ]
        result = {"req_ids": list(tokens), "sampled_token_ids": sampled}
        if "req_id_to_index" in ModelRunnerOutput.__dataclass_fields__:  # before 0.34
            result["req_id_to_index"] = {name: index for index, name in enumerate(tokens)}
        scheduler.update_from_output(output, ModelRunnerOutput(**result))
    print(f"{num_wrong} positions wrong" if num_wrong else "right")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
