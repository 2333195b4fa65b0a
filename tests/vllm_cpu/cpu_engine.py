"""The real vLLM engine on a CPU, with steps that are really cut into microbatches.

vLLM cuts a step only where several data-parallel ranks agree, on a GPU. `cut_v1` and `cut_v2` have its two
model runners do so on a CPU with one rank. Nothing else of the engine is changed: scheduler, prefix cache,
batch, order, vote and sampling are vLLM's.

Import this before vllm: it sets the environment that vllm reads at import.
"""

from __future__ import annotations

import importlib.metadata
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# The CPU platform, in the wheels that are builds for CUDA. Without any device: with one that is only hidden,
# vLLM would do without Triton.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# One thread: the model is tiny, and on a busy machine threads spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
if V2 or not list(importlib.metadata.Distribution.discover(name="vllm-cpu")):
    # Kernels of V2, in 0.33 of V1 too, are Triton's; its interpreter runs them on a CPU. vLLM looks for a
    # backend named "cpu".
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Inductor would ask that backend for more than it has.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    import types as _types

    import triton.backends

    triton.backends.backends.setdefault(
        "cpu", _types.SimpleNamespace(driver=_types.SimpleNamespace(is_active=lambda: True))
    )

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cut_v1
import cut_v2

from ubatch_guard.runner_mixin import runner_guard
from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy

BLOCK_SIZE = 32
TOLERANCE = 1e-5
"""Of log-probabilities, which are about -6 here. Seen between runs that are both right: 1.5e-6."""
Prompt = list[int]

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
        hand_overs: From one microbatch to the next, in the middle of a layer (V2).
        orders: Request ids in batch order, of each eligible step.
    """

    steps: int = 0
    eligible: int = 0
    split: int = 0
    hand_overs: int = 0
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
        self._cut = cut_v2 if V2 else cut_v1
        self._cut.let_cut()
        self.llm = vllm.LLM(str(model), **(settings | options))
        self.release: str = vllm.__version__
        self.runner = _find_worker(self.llm).model_runner
        assert self.v2 is V2
        self.steps = Steps()
        self.ranks: tuple[int, int] | None = None
        """Data-parallel ranks that vote on a step, and which is this; None: one, others do as it does."""
        self.votes = 0
        """Steps and dummy steps voted on."""
        self.allowed: bool | None = None
        """This rank's last vote."""
        self._default_min_tokens = min_tokens
        self._sequence = 0
        self._cut.attach(self)
        self.set(dbo=False)

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
        min_tokens: int | None = None,
        **settings: Any,
    ) -> None:
        """Decide how the next run is done.

        Args:
            dbo: Cut the steps that are allowed to be.
            num_ubatches: Into how many microbatches.
            policy: Of the guard; None: off.
            vllm_guard: Leave vLLM's own guard in place (V1; V2 has none).
            threshold: ``reorder_batch_threshold``, standing in for an attention backend that has one (V1).
            min_tokens: Other than the engine's.
            settings: Further fields of `Settings`.
        """
        # A microbatch has a token at least.
        self.min_tokens = max(min_tokens or self._default_min_tokens, num_ubatches)
        config = self.runner.parallel_config
        config.dbo_prefill_token_threshold = config.dbo_decode_token_threshold = self.min_tokens
        config.enable_dbo = dbo and num_ubatches == 2
        config.ubatch_size = num_ubatches if dbo and num_ubatches > 2 else 0
        self.runner.ubatch_guard_settings = Settings(policy=policy, log_interval=0.0, **settings)
        self._cut.set(self, dbo=dbo, num_ubatches=num_ubatches, vllm_guard=vllm_guard, threshold=threshold)

    @property
    def guard(self) -> Any:
        return runner_guard(self.runner)

    def forget(self) -> None:
        """Empty the prefix cache and zero the KV: right values left by an earlier run would hide a hazard."""
        assert self.llm.reset_prefix_cache()
        for cache in self.runner.kv_caches:
            cache.zero_()

    def run(
        self,
        workload: Workload,
        before_step: Callable[[int], None] | None = None,
        priorities: Sequence[int] | None = None,
    ) -> Run:
        """Answer a workload greedily on an empty cache; ``before_step`` is told the number of each step.

        ``priorities`` are those of the requests, the most urgent the lowest; None: all alike.
        """
        import vllm

        self.forget()
        self.steps = Steps()
        engine = self.llm.llm_engine
        self._sequence += 1
        names = [f"{self._sequence}-{place}" for place in range(len(workload.prompts))]
        waiting = list(
            zip(
                workload.arrivals,
                names,
                workload.prompts,
                workload.max_tokens,
                priorities or [0] * len(names),
                strict=True,
            )
        )
        done: dict[str, Any] = {}
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and (waiting[0][0] <= step or not engine.has_unfinished_requests()):
                _, name, prompt, max_tokens, priority = waiting.pop(0)
                params = vllm.SamplingParams(
                    temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=5, detokenize=False
                )
                engine.add_request(name, {"prompt_token_ids": prompt}, params, priority=priority)
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

    def keep_company(self) -> None:
        """Vote once without a request, as vLLM's idle ranks do by a dummy batch."""
        self._cut.keep_company(self)

    def note_step(self, req_ids: Sequence[str], num_tokens: int) -> bool:
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


def _find_worker(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
