"""A scheduler of the installed vLLM, without an engine; what the histories take from vLLM is named here."""

from __future__ import annotations

import functools
import inspect
import json
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MAX_MODEL_LEN = 160


class NotAvailable(Exception):
    """The installed vLLM has not what the histories need; the message says what."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a history's scheduler is set up, and what happens to it; the names are vLLM's where it has one."""

    policy: str
    async_scheduling: bool
    num_speculative_tokens: int
    num_lookahead_tokens: int
    windows: tuple[int | None, ...]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    scheduler_reserve_full_isl: bool
    cache_aware_admission_window: int
    prefill_schedule_interval: int
    kv_role: str | None
    share_asynchronous: float
    failing_loads: bool
    streaming: bool
    aborts: bool
    resets: bool
    vocabulary: int

    @classmethod
    def draw(cls, rng: random.Random, failing_loads: bool) -> Options:
        """Draw them; failing loads come with one group, one step at a time and no drafts."""
        block_size = rng.choice([4, 8])
        window = 2 * block_size + 1
        windows = rng.choice([(None,), (None,), (window,), (None, window), (None, window, window + 5)])
        num_drafts = rng.choice([0, 0, 3])
        max_num_seqs = rng.choice([4, 8, 12])
        drawn = cls(
            policy=rng.choice(["fcfs", "fcfs", "priority"]),
            async_scheduling=rng.random() < 0.5,
            num_speculative_tokens=num_drafts,
            num_lookahead_tokens=rng.choice([0, 0, num_drafts]),
            windows=windows,
            block_size=block_size,
            num_blocks=rng.choice([24, 40, 80, 200]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_seqs, rng.choice([16, 32, 64, 128])),
            long_prefill_token_threshold=rng.choice([0, 0, 10, 20]),
            scheduler_reserve_full_isl=rng.random() < 0.3,
            cache_aware_admission_window=rng.choice([0, 0, 4]),
            prefill_schedule_interval=rng.choice([1, 1, 3]),
            kv_role=rng.choice([None, None, "kv_consumer", "kv_both"]),
            share_asynchronous=rng.choice([0.0, 0.5, 1.0]),
            failing_loads=failing_loads,
            streaming=rng.random() < 0.3,
            aborts=rng.random() < 0.4,
            resets=rng.random() < 0.2,
            vocabulary=rng.choice([3, 50]),
        )
        if not failing_loads:
            return drawn
        return replace(
            drawn,
            async_scheduling=False,
            num_speculative_tokens=0,
            num_lookahead_tokens=0,
            windows=(None,),
            kv_role="kv_consumer",
            share_asynchronous=0.0,
            streaming=False,
        )


@functools.cache
def installed_vllm() -> SimpleNamespace:
    """The classes of vLLM by name, its version, and its batch order (``sort_batch_req_ids``).

    Raises:
        NotAvailable: There is no vLLM, or one without them.
    """
    try:
        import vllm
        from vllm import SamplingParams
        from vllm import config as configs
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface, outputs
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.request import Request, RequestStatus
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
    except ImportError as error:
        raise NotAvailable(str(error)) from error
    init_none_hash(sha256)
    return SimpleNamespace(
        version=vllm.__version__,
        configs=configs,
        interface=kv_cache_interface,
        outputs=outputs,
        SamplingParams=SamplingParams,
        Scheduler=Scheduler,
        AsyncScheduler=AsyncScheduler,
        Request=Request,
        aborted=RequestStatus.FINISHED_ABORTED,
        StructuredOutputManager=StructuredOutputManager,
        sort_batch_req_ids=sort_batch_req_ids,
        block_hasher=functools.cache(lambda block_size: get_request_block_hasher(block_size, sha256)),
    )


def vllms_order(scheduler_output: Any, decode_query_len: int, new_req_ids: set[str]) -> list[str]:
    """The batch order of the installed Model Runner V2 (releases before 0.30 do not look at drafts)."""
    sort = installed_vllm().sort_batch_req_ids
    # The last one is asked for by contrib/vllm-0.34/scheduler-order.patch.
    known = {
        "num_tokens_per_req": scheduler_output.num_scheduled_tokens,
        "draft_tokens": scheduler_output.scheduled_spec_decode_tokens,
        "decode_query_len": decode_query_len,
        "new_req_ids": new_req_ids,
    }
    asked = inspect.signature(sort).parameters
    if asked.keys() - known.keys():
        raise NotAvailable(f"sort_batch_req_ids asks for {', '.join(asked)}")
    return list(sort(**{name: known[name] for name in asked}))


def make_runner_output(ids: list[str], sampled: list[list[int]], kv_connector_output: Any) -> Any:
    """What a model runner returns of a step."""
    made = installed_vllm().outputs.ModelRunnerOutput
    given: dict[str, Any] = {
        "req_ids": ids,
        "sampled_token_ids": sampled,
        "kv_connector_output": kv_connector_output,
    }
    if "req_id_to_index" in inspect.signature(made).parameters:
        given["req_id_to_index"] = {request: number for number, request in enumerate(ids)}
    return made(**given)


def make_scheduler(options: Options) -> tuple[Any, Any, Any, list[str]]:
    """A scheduler, its ``VllmConfig`` and ``KVCacheConfig``, and the options that this release has not.

    Raises:
        NotAvailable: It cannot be made so.
    """
    try:
        return _make_scheduler(options)
    except Exception as error:  # another release may object in any way; the reason is what matters
        raise NotAvailable(f"no scheduler can be made: {type(error).__name__}: {error}") from error


def _make_scheduler(options: Options) -> tuple[Any, Any, Any, list[str]]:
    vllm = installed_vllm()
    vllm_config, absent = _vllm_config(options)
    shape = {
        "block_size": options.block_size,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": vllm_config.model_config.dtype,
    }
    specs = [
        vllm.interface.FullAttentionSpec(**shape)
        if window is None
        else vllm.interface.SlidingWindowSpec(**shape, sliding_window=window)
        for window in options.windows
    ]
    kv_cache_config = vllm.interface.KVCacheConfig(
        num_blocks=options.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            vllm.interface.KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)
        ],
    )
    scheduler = (vllm.AsyncScheduler if options.async_scheduling else vllm.Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=vllm.StructuredOutputManager(vllm_config),
        block_size=options.block_size,
        log_stats=False,
    )
    if options.num_lookahead_tokens:
        scheduler.num_lookahead_tokens = options.num_lookahead_tokens
    return scheduler, vllm_config, kv_cache_config, absent


def _vllm_config(options: Options) -> tuple[Any, list[str]]:
    configs = installed_vllm().configs
    model = configs.ModelConfig(
        model=_model_folder(), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, dtype="float32"
    )
    speculative = transfer = None
    if options.num_speculative_tokens:
        speculative = configs.SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=options.num_speculative_tokens,
            prompt_lookup_max=3,
            prompt_lookup_min=1,
            target_model_config=model,
            target_parallel_config=configs.ParallelConfig(),
        )
    if options.kv_role is not None:
        transfer = configs.KVTransferConfig(
            kv_connector="MadeUpConnector",
            kv_connector_module_path="ubatch_guard.vllm.scheduler_histories.connector",
            kv_role=options.kv_role,
            kv_load_failure_policy="recompute",
        )
    config = configs.VllmConfig(
        model_config=model,
        scheduler_config=configs.SchedulerConfig(
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy=options.policy,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
        ),
        cache_config=configs.CacheConfig(block_size=options.block_size, enable_prefix_caching=True),
        parallel_config=configs.ParallelConfig(),
        speculative_config=speculative,
        kv_transfer_config=transfer,
    )
    # The platform may have decided otherwise.
    config.cache_config.block_size = options.block_size
    config.cache_config.num_gpu_blocks = options.num_blocks
    config.cache_config.enable_prefix_caching = True
    config.scheduler_config.async_scheduling = options.async_scheduling
    newer = {
        name: getattr(options, name)
        for name in (
            "scheduler_reserve_full_isl",
            "cache_aware_admission_window",
            "prefill_schedule_interval",
        )
    }
    newer["cache_aware_admission_threshold"] = 0.0
    absent = [name for name in newer if not hasattr(config.scheduler_config, name)]
    for name in newer.keys() - absent:
        setattr(config.scheduler_config, name, newer[name])
    return config, absent


@functools.cache
def _model_folder() -> str:
    """A model's configuration, without weights."""
    folder = Path(tempfile.mkdtemp(prefix="ubatch-guard-histories-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
