"""The real vLLM engine on a CPU, with microbatches that are really run one after the other.

vLLM cuts a step only where several data-parallel ranks agree, on a GPU. Here the same cut is made on the
CPU: vLLM's own ``maybe_create_ubatch_slices`` and attention metadata per slice, then the model once per
slice. Nothing else of the engine is changed: scheduler, prefix cache, persistent batch, order, vote and
sampling are vLLM's.

Import this before vllm: it sets the environment that vllm reads at import.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# One thread: the model is tiny, and on a busy machine threads spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # V2's own kernels are Triton's; its interpreter runs them on a CPU. vLLM looks for a backend named "cpu".
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import types as _types

    import triton.backends

    triton.backends.backends.setdefault(
        "cpu", _types.SimpleNamespace(driver=_types.SimpleNamespace(is_active=lambda: True))
    )

import dataclasses
import functools
import gc
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ubatch_guard.runner_mixin import runner_guard
from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy

BLOCK_SIZE = 32
TOLERANCE = 1e-5
"""Of log-probabilities, which are about -6 here. Seen between runs that are both right: 1.5e-6."""
Prompt = list[int]
Vote = Callable[..., tuple[bool, int]]
"""From tokens, padded tokens, this rank's vote and whether all are decodes, to the decision and padding."""

if TYPE_CHECKING:
    from workloads import Workload


@dataclass(slots=True)
class Answer:
    """What a request got: its tokens, and the log-probabilities of the likeliest at each step."""

    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]

    def differs(self, other: Answer) -> bool:
        """Whether a token is another, or a log-probability by more than `TOLERANCE`.

        Where two tokens are as likely as each other to within it, rounding may choose either, and what comes
        after cannot be compared.
        """
        for mine, theirs, my_token, their_token in zip(
            self.logprobs, other.logprobs, self.token_ids, other.token_ids, strict=True
        ):
            if _differ(mine, theirs):
                return True
            if my_token != their_token:
                return False
        return False


def _differ(mine: dict[int, float], theirs: dict[int, float]) -> bool:
    """Compare the likeliest tokens; one that only one side has is at most as likely as the other's last."""
    my_last, their_last = min(mine.values()), min(theirs.values())
    return any(
        abs(mine.get(token, my_last) - theirs.get(token, their_last)) > TOLERANCE
        for token in mine.keys() | theirs.keys()
    )


@dataclass(slots=True)
class Steps:
    """What became of the steps of a run.

    Attributes:
        steps: Steps that ran tokens.
        eligible: Of two requests or more, and at least ``Engine.min_tokens`` tokens: those that would be
            cut if every one were allowed.
        split: Those that were cut.
        orders: Request ids in batch order, of each eligible step.
    """

    steps: int = 0
    eligible: int = 0
    split: int = 0
    orders: list[list[str]] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """The answers to the prompts, in their order, and the steps it took."""

    answers: list[Answer]
    steps: Steps

    def num_wrong(self, whole: Run) -> int:
        """Requests that were answered otherwise than in the whole run."""
        return sum(mine.differs(theirs) for mine, theirs in zip(self.answers, whole.answers, strict=True))


class Engine:
    """A vLLM engine whose steps can be cut.

    Args:
        model: Folder of the model.
        min_tokens: Steps of fewer tokens are run whole, as by vLLM's DBO thresholds.
        options: Further arguments of ``vllm.LLM``.
    """

    def __init__(self, model: Path, *, min_tokens: int = 64, **options: Any) -> None:
        import vllm

        settings: dict[str, Any] = {
            "max_model_len": 2048,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 256,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 2048,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "async_scheduling": False,
            "disable_log_stats": True,
            "seed": 0,
        }
        _let_v1_cut()
        self.llm = vllm.LLM(str(model), **(settings | options))
        self.min_tokens = min_tokens
        self.runner = _find_runner(self.llm)
        self.runner.parallel_config.dbo_prefill_token_threshold = min_tokens
        self.runner.parallel_config.dbo_decode_token_threshold = min_tokens
        self.steps = Steps()
        self.sequential_ubatch_runner: Any = None
        """V2: what runs its microbatches."""
        self.allowed: bool | None = None
        """V2: the last vote that reached ``dispatch_cg_and_sync_dp``."""
        self.vote: Vote | None = None
        """V1: how ranks agree on a step; None: the one rank's vote decides."""
        self._sequence = 0
        self._microbatch()

    @property
    def v2(self) -> bool:
        return hasattr(self.runner, "req_states")

    def set(
        self,
        *,
        dbo: bool,
        num_ubatches: int = 2,
        policy: Policy | None = None,
        vllm_guard: bool = True,
        threshold: int | None = None,
        **settings: Any,
    ) -> None:
        """Decide how the next run is done.

        Args:
            dbo: Cut the steps that are allowed to be.
            num_ubatches: Into how many microbatches.
            policy: Of the guard; None: off.
            vllm_guard: Leave vLLM's own guard in place.
            threshold: ``reorder_batch_threshold``, standing in for an attention backend that has one.
            settings: Further fields of `Settings`.
        """
        runner = self.runner
        config = runner.parallel_config
        config.enable_dbo = dbo and num_ubatches == 2
        config.ubatch_size = num_ubatches if dbo and num_ubatches > 2 else 0
        runner.ubatch_guard_settings = Settings(policy=policy, log_interval=0.0, **settings)
        if self.v2:
            runner.ubatch_runner = self.sequential_ubatch_runner if dbo else None
        else:
            runner.reorder_batch_threshold = threshold
            runner.__dict__.pop("_allow_microbatching", None)
            if not vllm_guard:
                runner._allow_microbatching = lambda num_reqs, num_scheduled_tokens_np: True

    @property
    def guard(self) -> Any:
        return runner_guard(self.runner)

    def forget(self) -> None:
        """Empty the prefix cache and zero the KV: right values left by an earlier run would hide a hazard."""
        assert self.llm.reset_prefix_cache()
        for cache in self.runner.kv_caches:
            cache.zero_()

    def run(self, workload: Workload, before_step: Callable[[int], None] | None = None) -> Run:
        """Answer a workload greedily on an empty cache; ``before_step`` is told the number of each step."""
        import vllm

        self.forget()
        self.steps = Steps()
        engine = self.llm.llm_engine
        self._sequence += 1
        names = [f"{self._sequence}-{place}" for place in range(len(workload.prompts))]
        waiting = list(zip(workload.arrivals, names, workload.prompts, workload.max_tokens, strict=True))
        done: dict[str, Any] = {}
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and (waiting[0][0] <= step or not engine.has_unfinished_requests()):
                _, name, prompt, max_tokens = waiting.pop(0)
                params = vllm.SamplingParams(
                    temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=5, detokenize=False
                )
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
            if before_step is not None:
                before_step(step)
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
            step += 1
        return Run([_answer(done[name].outputs[0]) for name in names], self.steps)

    def close(self) -> None:
        """Free the engine, so that another can be made in this process."""
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.runner
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def _microbatch(self) -> None:
        if self.v2:
            _microbatch_v2(self)
        else:
            _microbatch_v1(self)

    def _note_step(self, req_ids: Sequence[str], num_tokens: int) -> bool:
        """Count a step; whether it is eligible."""
        self.steps.steps += 1
        eligible = len(req_ids) > 1 and num_tokens >= self.min_tokens
        self.steps.eligible += eligible
        if eligible:
            self.steps.orders.append(list(req_ids))
        return eligible


def _answer(completion: Any) -> Answer:
    return Answer(
        tuple(completion.token_ids),
        tuple({token: entry.logprob for token, entry in step.items()} for step in completion.logprobs),
    )


def _find_runner(llm: Any) -> Any:
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def _let_v1_cut() -> None:
    """Put the cut below whatever hooks the class later on: a runner with a ``cut_step`` decides by it."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    determine = GPUModelRunner._determine_batch_execution_and_padding
    if getattr(determine, "lets_cut", False):
        return

    @functools.wraps(determine)
    def determine_batch_execution_and_padding(self: Any, *args: Any, **kwargs: Any) -> Any:
        decided = determine(self, *args, **kwargs)
        cut_step = self.__dict__.get("cut_step")
        return decided if cut_step is None else cut_step(decided, **kwargs)

    determine_batch_execution_and_padding.lets_cut = True
    GPUModelRunner._determine_batch_execution_and_padding = determine_batch_execution_and_padding


def _microbatch_v1(engine: Engine) -> None:
    from vllm.forward_context import create_forward_context, get_forward_context, override_forward_context
    from vllm.v1.worker.ubatch_utils import is_last_ubatch_empty

    runner = engine.runner
    forward = runner._model_forward

    def cut_step(
        decided: Any,
        *,
        num_tokens: int,
        num_scheduled_tokens_np: Any,
        allow_microbatching: bool = True,
        **_: Any,
    ) -> Any:
        eligible = engine._note_step(runner.input_batch.req_ids, num_tokens)
        config, batch_desc = runner.parallel_config, decided[1]
        if engine.vote is not None:
            uniform = bool((num_scheduled_tokens_np == 1).all())
            split, padded = engine.vote(num_tokens, batch_desc.num_tokens, allow_microbatching, uniform)
            batch_desc = dataclasses.replace(batch_desc, num_tokens=padded)
        else:
            split = config.use_ubatching and allow_microbatching and eligible
            # The last microbatch has tokens: a step of at least min_tokens has more than its padding.
            assert not split or not is_last_ubatch_empty(
                num_tokens, batch_desc.num_tokens, config.num_ubatches
            )
        engine.steps.split += split
        return decided[0], batch_desc, split, *decided[3:]

    def model_forward(self: Any, **kwargs: Any) -> Any:
        whole = get_forward_context()
        if whole.ubatch_slices is None:
            return forward(**kwargs)
        outputs = []
        for place, ubatch in enumerate(whole.ubatch_slices):
            context = create_forward_context(
                whole.attn_metadata[place], self.vllm_config, slot_mapping=whole.slot_mapping[place]
            )
            inputs = {
                name: value[ubatch.token_slice] if isinstance(value, torch.Tensor) else value
                for name, value in kwargs.items()
            }
            with override_forward_context(context):
                outputs.append(forward(**inputs))
        return torch.cat(outputs)

    runner.cut_step = cut_step
    runner._model_forward = types.MethodType(model_forward, runner)
    for group in (group for groups in runner.attn_groups for group in groups):
        group.create_metadata_builders(
            runner.vllm_config, runner.device, group.kv_cache_spec.block_size, num_metadata_builders=4
        )


def _microbatch_v2(engine: Engine) -> None:
    import vllm.v1.worker.gpu.model_runner as module
    from vllm.forward_context import create_forward_context, override_forward_context
    from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner, merge_ubatch_outputs, slice_model_inputs

    class SequentialUBatchRunner(UBatchRunner):
        """vLLM's microbatches without streams and threads: one after the other."""

        def __init__(self, runner: Any) -> None:
            # What prepare() reads; the original makes CUDA streams on the way.
            self.vllm_config = runner.vllm_config
            self.parallel_config = runner.parallel_config
            self.num_ubatches = 2
            self.dcp_size, self.dcp_rank, self.cp_interleave = 1, 0, 1
            self.device = runner.device
            self.model_state = runner.model_state
            self.attn_groups = runner.attn_groups
            self.kv_cache_config = runner.kv_cache_config
            rows = [runner.max_num_reqs] * self.num_ubatches
            self.ubatch_query_start_loc = [torch.zeros(n + 1, dtype=torch.int32) for n in rows]
            self.ubatch_seq_lens = [torch.zeros(n, dtype=torch.int32) for n in rows]
            self.ubatch_dcp_local_seq_lens = [None] * self.num_ubatches

        def _make_forward_contexts(
            self, ubatch_slices: Any, attn_metadata: Any, slot_mappings_by_layer: Any, is_padding: Any
        ) -> list[Any]:
            # Without the data-parallel metadata, which one rank has not.
            return [
                create_forward_context(metadata, self.vllm_config, slot_mapping=slots, is_padding=padding)
                for metadata, slots, padding in zip(
                    attn_metadata, slot_mappings_by_layer, is_padding, strict=True
                )
            ]

        def run(self, model: Any, model_inputs: dict[str, Any], ubatch_state: Any) -> Any:
            outputs = []
            for ubatch, context in zip(ubatch_state.slices, ubatch_state.forward_contexts, strict=True):
                with override_forward_context(context):
                    outputs.append(model(**slice_model_inputs(model_inputs, ubatch.token_slice)))
            return merge_ubatch_outputs(outputs)

    runner = engine.runner
    # vLLM's own, also where an engine before this one has put another in its place.
    dispatch = inspect.unwrap(module.dispatch_cg_and_sync_dp)
    prepare_inputs = runner.prepare_inputs

    @functools.wraps(dispatch)
    def dispatch_cg_and_sync_dp(*args: Any, **kwargs: Any) -> Any:
        batch_desc, sync = dispatch(*args, **kwargs)
        engine.allowed = kwargs["allow_ubatching"]
        _, num_reqs, num_tokens = args[:3]
        if kwargs["allow_ubatching"] and num_reqs > 1 and num_tokens >= engine.min_tokens:
            batch_desc = dataclasses.replace(batch_desc, num_ubatches=2)
            engine.steps.split += 1
        return batch_desc, sync

    def note_inputs(*args: Any, **kwargs: Any) -> Any:
        input_batch = prepare_inputs(*args, **kwargs)
        engine._note_step(input_batch.req_ids, input_batch.num_tokens)
        return input_batch

    module.dispatch_cg_and_sync_dp = dispatch_cg_and_sync_dp
    runner.prepare_inputs = note_inputs
    engine.sequential_ubatch_runner = SequentialUBatchRunner(runner)
    for group in (group for groups in runner.attn_groups for group in groups):
        group.metadata_builders *= 2
