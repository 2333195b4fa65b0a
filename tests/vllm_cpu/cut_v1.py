"""Microbatches of Model Runner V1 (up to vLLM 0.33), run one after the other on a CPU.

vLLM's own ``maybe_create_ubatch_slices`` and attention metadata per slice, then the model once per slice.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from cpu_engine import Engine


def let_cut() -> None:
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


def attach(engine: Engine) -> None:
    """Have the runner of ``engine`` cut its steps, where its ``parallel_config`` says so."""
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
        eligible = engine.note_step(runner.input_batch.req_ids, num_tokens)
        config, batch_desc = runner.parallel_config, decided[1]
        engine.allowed = allow_microbatching
        if engine.ranks is not None:
            uniform = bool((num_scheduled_tokens_np == 1).all())
            split, padded = _vote(engine, num_tokens, batch_desc.num_tokens, allow_microbatching, uniform)
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


def set(engine: Engine, *, dbo: bool, num_ubatches: int, vllm_guard: bool, threshold: int | None) -> None:
    """What `Engine.set` is told, but for what the ``parallel_config`` says."""
    runner = engine.runner
    runner.reorder_batch_threshold = threshold
    runner.__dict__.pop("_allow_microbatching", None)
    if not vllm_guard:
        runner._allow_microbatching = lambda num_reqs, num_scheduled_tokens_np: True


def keep_company(engine: Engine) -> None:
    """Vote as an idle rank does, with one token."""
    _vote(engine, 1, 1, True, True)


def _vote(engine: Engine, num_tokens: int, padded: int, allowed: bool, uniform: bool) -> tuple[bool, int]:
    """vLLM's own vote among ranks: whether to cut, and to how many tokens this one pads."""
    from vllm.v1.worker.dp_utils import coordinate_batch_across_dp

    assert engine.ranks is not None
    engine.votes += 1
    config = copy.copy(engine.runner.parallel_config)
    config.data_parallel_size, config.data_parallel_rank = engine.ranks
    split, across, _ = coordinate_batch_across_dp(
        num_tokens_unpadded=num_tokens,
        parallel_config=config,
        allow_microbatching=allowed,
        num_tokens_padded=padded,
        uniform_decode=uniform,
    )
    return split, int(across[config.data_parallel_rank])
