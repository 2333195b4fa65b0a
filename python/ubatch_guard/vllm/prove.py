"""``ubatch-guard doctor --prove``: the installed vLLM's own classes, driven through steps without a model.

A runner object is made without its constructor, so without a device: it has vLLM's own methods, the hooks on
them, and stand-ins for what touches the device. Its steps are vLLM's own `SchedulerOutput`; what is looked at
is the batch order that vLLM's code arrives at, and the vote as it reaches the ranks' agreement. Then random
histories on vLLM's own scheduler, whose steps are ordered by the guard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy
from ubatch_guard.vllm import plugin
from ubatch_guard.vllm.attach import SETTINGS
from ubatch_guard.vllm.generations import GENERATIONS
from ubatch_guard.vllm.hooking import hook
from ubatch_guard.vllm.v2 import V2

ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "CRITICAL"}
"""With these vLLM can be imported on any machine."""
_BLOCK_SIZE = 16
_NUM_BLOCKS = 64
_LEAST_STEPS = 1500
"""Of histories, however slow the machine: fewer may have no unsafe step among them."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of one step.

    Attributes:
        runner: ``v1`` or ``v2``.
        step: ``hazardous`` (a reader of what a longer request writes in the same step) or ``safe``.
        order: Request ids in the order that the batch had at the vote; empty where it did not get there.
        vote: Whether this rank lets the step be cut; None: it did not get there.
        right: The guard did what its mode asks for.
        why: What is wrong, or what kept it from being shown.
    """

    runner: str
    step: str
    order: tuple[str, ...]
    vote: bool | None
    right: bool
    why: str = ""


def prove(settings: Settings) -> list[Proof]:
    """Drive each generation of model runners that the installed vLLM has through two steps.

    Imports vLLM, with the environment changed to `ENVIRONMENT`.

    Args:
        settings: As the engine would be started with.

    Raises:
        ImportError: vLLM, or what it needs, cannot be imported here; so does whatever else its import raises.
    """
    os.environ.update(ENVIRONMENT)
    proofs = []
    drives = {"v1": _drive_v1, "v2": _drive_v2}
    for generation in GENERATIONS:
        try:
            plugin.install(dataclasses.replace(settings, strict=False, trace=None))
            module = importlib.import_module(generation.module)
        except ModuleNotFoundError as error:
            if error.name == generation.module:
                continue
            raise
        if not hasattr(module.GPUModelRunner, generation.mark):
            # A V2 from before it microbatched.
            continue
        for name, requests in (("hazardous", _HAZARDOUS), ("safe", _SAFE)):
            proofs.append(_proof(generation.name, name, drives[generation.name], module, requests, settings))
    return proofs


@dataclass(frozen=True, slots=True)
class _Request:
    name: str
    block_ids: list[int]
    num_computed_tokens: int
    num_scheduled_tokens: int


# A reader with a hit on the four blocks that a longer request computes in this very step.
_WRITER = _Request("writer", [1, 2, 3, 4, 5], 0, 72)
_READER = _Request("reader", [1, 2, 3, 4, 9], 64, 8)
_HAZARDOUS = (_WRITER, _READER)
_SAFE = (_WRITER, dataclasses.replace(_READER, name="stranger", block_ids=[11, 12, 13, 14, 19]))

_Drive = Callable[[Any, tuple[_Request, ...]], tuple[tuple[str, ...], bool]]


def _proof(
    runner: str, step: str, drive: _Drive, module: Any, requests: tuple[_Request, ...], settings: Settings
) -> Proof:
    try:
        order, vote = drive(module, requests)
    except Exception as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f" in {place.tb_frame.f_code.co_name}" if place else ""
        return Proof(runner, step, (), None, False, f"{type(error).__name__}: {error}{where}")
    writer_first = order.index("writer") == 0
    if settings.policy is None:
        return Proof(runner, step, order, vote, False, "the guard is off")
    if step == "safe":
        return Proof(runner, step, order, vote, vote, "" if vote else "a safe step is refused")
    if settings.policy is Policy.OBSERVE:
        return Proof(runner, step, order, vote, False, "the guard only observes")
    right = not vote or writer_first
    if settings.policy is Policy.REORDER and right:
        right = vote
        return Proof(runner, step, order, vote, right, "" if right else "overlap is lost")
    return Proof(runner, step, order, vote, right, "" if right else "an unsafe step may be cut")


class _Agreement(Exception):
    """The vote has reached the ranks' agreement, where the proof ends."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed


class _Whatever:
    """Stands in for what a step only hands things to."""

    def __getattr__(self, name: str) -> _Whatever:
        return _Whatever()

    def __call__(self, *args: Any, **kwargs: Any) -> _Whatever:
        return _Whatever()


def _drive_v2(module: Any, requests: tuple[_Request, ...]) -> tuple[tuple[str, ...], bool]:
    """``execute_model`` up to ``dispatch_cg_and_sync_dp``."""
    import torch

    runner = object.__new__(module.GPUModelRunner)
    rows = torch.zeros((8, 32), dtype=torch.int32)
    lengths = np.zeros((1, 8), np.int32)
    states = SimpleNamespace(
        req_id_to_index={},
        prefill_len=SimpleNamespace(np=np.zeros(8, np.int32)),
        num_computed_prefill_tokens=np.zeros(8, np.int32),
        num_computed_tokens_np=np.zeros(8, np.int32),
        max_seq_len=np.zeros(8, np.int32),
    )
    orders: list[tuple[str, ...]] = []

    def add_requests(scheduler_output: Any) -> None:
        for index, request in enumerate(scheduler_output.scheduled_new_reqs):
            states.req_id_to_index[request.req_id] = index
            states.prefill_len.np[index] = len(request.prefill_token_ids)
            states.num_computed_prefill_tokens[index] = request.num_computed_tokens
            states.num_computed_tokens_np[index] = request.num_computed_tokens
            (row,) = request.block_ids
            rows[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
            lengths[0, index] = len(row)

    def agree(*args: Any, allow_ubatching: bool, **kwargs: Any) -> Any:
        raise _Agreement(allow_ubatching)

    gather = runner.gather_batch_req_state

    def gather_noted(*args: Any, **kwargs: Any) -> Any:
        gathered = gather(*args, **kwargs)
        orders.append(tuple(gathered[0].req_ids))
        return gathered

    nothing = (
        "adaptive_verification",
        "aux_output_connector",
        "encoder_cache",
        "kv_connector",
        "lora_config",
        "pcp_manager",
        "pooling_runner",
        "pp_handler",
        "prompt_logprobs_worker",
        "speculator",
    )
    for name in nothing:
        setattr(runner, name, None)
    for name in ("cudagraph_manager", "draft_tokens_handler", "model_state"):
        setattr(runner, name, _Whatever())
    for name in ("free_states", "update_requests", "update_pp_decode_requests"):
        setattr(runner, name, lambda *args: None)
    runner.block_tables = SimpleNamespace(
        block_tables=[SimpleNamespace(gpu=rows)],
        num_blocks=SimpleNamespace(np=lengths),
        apply_staged_writes=lambda: None,
    )
    runner.req_states = states
    runner.add_requests = add_requests
    runner.gather_batch_req_state = gather_noted
    runner.decode_query_len, runner.use_pp, runner.is_encoder_decoder = 1, False, False
    runner.attn_groups = []
    runner.kv_cache_config = _kv_cache_config()
    runner.parallel_config = _parallel_config()
    runner.ubatch_runner = SimpleNamespace()
    with contextlib.suppress(AttributeError):  # properties of parallel_config, since 0.33
        runner.dp_size, runner.dp_rank = 2, 0
    with mock.patch.object(module, "dispatch_cg_and_sync_dp", agree), _quiet():
        try:
            runner.execute_model(_scheduler_output(requests))
        except _Agreement as agreement:
            return orders[-1], agreement.allowed
    raise RuntimeError("the step went on without the ranks' agreement")


def _drive_v1(module: Any, requests: tuple[_Request, ...]) -> tuple[tuple[str, ...], bool]:
    """``_update_states``; then the vote, by its method or as ``coordinate_batch_across_dp`` gets it."""
    runner = object.__new__(module.GPUModelRunner)
    for name in ("speculative_config", "lora_config", "num_accepted_tokens_event"):
        setattr(runner, name, None)
    for name in ("late_interaction_runner", "compilation_config", "cache_config"):
        setattr(runner, name, _Whatever())
    for name in ("is_pooling_model", "uses_mrope", "use_async_spec_decode", "use_async_scheduling"):
        setattr(runner, name, False)
    for name in ("uses_xdrope_dim", "num_spec_tokens"):
        setattr(runner, name, 0)
    for name in ("_on_request_state_removed", "_process_encoder_cache_scheduler_output"):
        setattr(runner, name, lambda *args: None)
    runner.requests, runner.num_prompt_logprobs, runner.kv_caches = {}, {}, []
    runner.encoder_cache = {}
    runner.attn_groups, runner.reorder_batch_threshold = [], None
    runner.uniform_decode_query_len = 1
    runner.model_config = SimpleNamespace(is_hybrid=False, is_encoder_decoder=False)
    runner.kv_cache_config = _kv_cache_config()
    runner.parallel_config = _parallel_config()
    runner.input_batch = _input_batch()
    group = SimpleNamespace(is_last_rank=True, is_first_rank=True, world_size=1)
    # V1 fills its batch from the front: the reader is to be there.
    scheduler_output = _scheduler_output(tuple(reversed(requests)))
    with mock.patch.object(module, "get_pp_group", return_value=group), _quiet():
        runner._update_states(scheduler_output)
        order = tuple(runner.input_batch.req_ids)
        counts = np.array([scheduler_output.num_scheduled_tokens[name] for name in order], np.int32)
        if hasattr(module.GPUModelRunner, "_allow_microbatching"):
            return order, bool(runner._allow_microbatching(len(order), counts))
        return order, _vote_by_keyword(module, runner, counts)


def _vote_by_keyword(module: Any, runner: Any, counts: Any) -> bool:
    def agree(*args: Any, allow_microbatching: bool, **kwargs: Any) -> Any:
        raise _Agreement(allow_microbatching)

    runner.vllm_config = SimpleNamespace(parallel_config=runner.parallel_config)
    runner.cudagraph_dispatcher = SimpleNamespace(
        dispatch=lambda *args, **kwargs: (
            SimpleNamespace(value=0, name="NONE"),
            SimpleNamespace(num_tokens=int(counts.sum())),
        )
    )
    for name in ("_pad_for_sequence_parallelism", "_is_uniform_decode"):
        setattr(runner, name, lambda *args, **kwargs: int(counts.sum()))
    with mock.patch.object(module, "coordinate_batch_across_dp", agree):
        try:
            runner._determine_batch_execution_and_padding(
                num_tokens=int(counts.sum()),
                num_reqs=len(counts),
                num_scheduled_tokens_np=counts,
                max_num_scheduled_tokens=int(counts.max()),
                use_cascade_attn=False,
            )
        except _Agreement as agreement:
            return agreement.allowed
    raise RuntimeError("the step went on without the ranks' agreement")


def _input_batch() -> Any:
    """The persistent batch of V1, vLLM's own; its parameters move from release to release."""
    import inspect

    import torch

    module = importlib.import_module("vllm.v1.worker.gpu_input_batch")
    given = {
        "max_num_reqs": 8,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "device": torch.device("cpu"),
        "pin_memory": False,
        "vocab_size": 1024,
        "block_sizes": [_BLOCK_SIZE],
        "kernel_block_sizes": [_BLOCK_SIZE],
        "max_num_blocks_per_req": [32],
    }
    parameters = inspect.signature(module.InputBatch).parameters
    return module.InputBatch(**{name: value for name, value in given.items() if name in parameters})


def _kv_cache_config() -> Any:
    """One group of full attention, by the names that the guard reads."""
    spec = type("FullAttentionSpec", (), {"block_size": _BLOCK_SIZE, "dcp_sharded": False})()
    return SimpleNamespace(
        num_blocks=_NUM_BLOCKS,
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)],
        needs_kv_cache_zeroing=False,
    )


def _parallel_config() -> Any:
    return SimpleNamespace(
        use_ubatching=True,
        enable_dbo=True,
        num_ubatches=2,
        ubatch_size=0,
        data_parallel_size=2,
        data_parallel_rank=0,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        dbo_decode_token_threshold=2,
        dbo_prefill_token_threshold=2,
        enable_fault_tolerance=False,
        tensor_parallel_size=1,
    )


def _scheduler_output(requests: tuple[_Request, ...]) -> Any:
    """A step of vLLM's with all ``requests`` new."""
    output = importlib.import_module("vllm.v1.core.sched.output")
    sampling = importlib.import_module("vllm.sampling_params").SamplingParams(temperature=0.0, max_tokens=1)
    new = []
    for request in requests:
        tokens = list(range(1, request.num_computed_tokens + request.num_scheduled_tokens + 1))
        given = {
            "req_id": request.name,
            "prompt_token_ids": tokens,
            "prefill_token_ids": tokens,
            "mm_features": [],
            "sampling_params": sampling,
            "block_ids": (list(request.block_ids),),
            "num_computed_tokens": request.num_computed_tokens,
        }
        fields = dataclasses.fields(output.NewRequestData)
        given |= {
            field.name: None
            for field in fields
            if field.name not in given
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        }
        new.append(output.NewRequestData(**given))
    empty = output.SchedulerOutput.make_empty()
    counts = {request.name: request.num_scheduled_tokens for request in requests}
    changes = {
        "scheduled_new_reqs": new,
        "num_scheduled_tokens": counts,
        "total_num_scheduled_tokens": sum(counts.values()),
    }
    return dataclasses.replace(empty, **changes)


class _BatchReqState(NamedTuple):
    """The batch of a V2 runner, as far as a guard looks at it."""

    req_ids: list[str]
    num_scheduled_tokens: np.ndarray[Any, np.dtype[np.int32]]
    num_tokens: int
    idx_mapping_np: np.ndarray[Any, np.dtype[np.intp]]
    is_prefilling_np: np.ndarray[Any, np.dtype[np.bool_]]


class _ScheduledRunner:
    """A V2 runner that only keeps what its guard asks it for; every step is large enough to be cut."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        speculative = vllm_config.speculative_config
        self.decode_query_len = 1 + (speculative.num_speculative_tokens if speculative else 0)
        self.kv_cache_config = kv_cache_config
        self.parallel_config = _parallel_config()
        self.ubatch_runner: Any = SimpleNamespace()
        self.req_states = SimpleNamespace(num_computed_tokens_np=np.zeros(4096, np.int32), req_id_to_index={})
        self._prefill_len = np.zeros(4096, np.int32)
        self._in_order: list[str] = []

    def order(self, scheduler_output: Any, in_order: list[str]) -> tuple[list[str], bool]:
        """The batch order and the vote of a step that vLLM would run ``in_order``."""
        self._in_order = in_order
        return self.execute_model(scheduler_output)

    def finish_requests(self, scheduler_output: Any) -> None:
        for req_id in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            self.req_states.req_id_to_index.pop(req_id, None)

    def execute_model(self, scheduler_output: Any) -> tuple[list[str], bool]:
        self.finish_requests(scheduler_output)
        cached, indices = scheduler_output.scheduled_cached_reqs, self.req_states.req_id_to_index
        for request in scheduler_output.scheduled_new_reqs:
            taken = set(indices.values())
            free = next(index for index in range(len(self._prefill_len)) if index not in taken)
            indices[request.req_id] = index = indices.get(request.req_id, free)
            tokens = request.prefill_token_ids or request.prompt_token_ids
            self._prefill_len[index] = len(tokens)
            self.req_states.num_computed_tokens_np[index] = request.num_computed_tokens
        for req_id, num_computed_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self.req_states.num_computed_tokens_np[indices[req_id]] = num_computed_tokens
        if not scheduler_output.num_scheduled_tokens:
            return [], True
        state, _ = self.gather_batch_req_state(scheduler_output, False)
        return state.req_ids, self.ubatch_runner is not None

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> tuple[_BatchReqState, None]:
        counts = scheduler_output.num_scheduled_tokens
        index = np.array([self.req_states.req_id_to_index[req_id] for req_id in self._in_order], np.intp)
        computed = self.req_states.num_computed_tokens_np[index]
        num_scheduled_tokens = np.array([counts[req_id] for req_id in self._in_order], np.int32)
        prefilling = computed < self._prefill_len[index]
        total = int(num_scheduled_tokens.sum())
        return _BatchReqState(self._in_order, num_scheduled_tokens, total, index, prefilling), None


def histories(settings: Settings, seconds: float = 6.0) -> dict[str, Any]:
    """Random histories on the installed vLLM's own scheduler, their steps ordered and voted on by the guard.

    Args:
        settings: As the engine would be started with.
        seconds: After so many no further history begins.

    Returns:
        ``steps``; ``sharing``: those in which a request reads what another one writes in them;
        ``unsafe_unguarded``: steps with an unsafe cut in vLLM's own order; ``unsafe_guarded``: in the order
        of the guard, where it voted yes; ``refused``: steps on which it voted no; ``said``: it in words.
    """
    from ubatch_guard.vllm.scheduler_histories import NotAvailable, run, running_first

    refused = 0
    guarded = type("_GuardedRunner", (_ScheduledRunner,), {SETTINGS: settings})
    hook(guarded, V2)

    def make_order(vllm_config: Any, kv_cache_config: Any) -> Callable[[Any, list[str]], list[str]]:
        runner: _ScheduledRunner = guarded(vllm_config, kv_cache_config)

        def order(scheduler_output: Any, in_order: list[str]) -> list[str]:
            nonlocal refused
            ids, allowed = runner.order(scheduler_output, in_order)
            if allowed:
                return ids
            refused += 1
            # It runs whole, and so it counts as safe.
            return running_first(scheduler_output, in_order)

        return order

    orders = {
        "unguarded": lambda vllm_config, kv_cache_config: lambda output, ids: ids,
        "guarded": make_order,
    }
    counts = dict.fromkeys(("steps", "sharing", "unsafe_unguarded", "unsafe_guarded"), 0)
    started = time.monotonic()
    seed = 0
    try:
        while counts["steps"] < _LEAST_STEPS or time.monotonic() - started < seconds:
            with _quiet():
                found = run(seed, 250, orders=orders)
            seed += 1
            counts["steps"] += found["steps"]
            counts["sharing"] += found["sharing_steps"]
            for name in orders:
                counts[f"unsafe_{name}"] += found["unsafe_steps"][name]
    except NotAvailable as error:
        return {**counts, "refused": refused, "said": f"not available: {error}"}
    said = (
        f"{counts['steps']} steps of vLLM's scheduler, {counts['sharing']} with sharing: unsafe "
        f"{counts['unsafe_unguarded']} without the guard and {counts['unsafe_guarded']} with it, {refused} "
        "refused"
    )
    return {**counts, "refused": refused, "said": said}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the guard's log lines: the proof says what came of it."""
    import logging

    logger = logging.getLogger("vllm.ubatch_guard")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
