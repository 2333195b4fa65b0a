"""Microbatches of Model Runner V2 (vLLM 0.30 and later) on a CPU, by vLLM's own ``UBatchRunner``.

All that decides is vLLM's: the vote and the agreement of ranks (``dispatch_cg_and_sync_dp``), the DBO
thresholds, the slices, ``UBatchRunner.prepare``, and ``UBatchRunner.run`` with a thread per microbatch. Put
in its place:

- Triton's kernels run in Triton's interpreter.
- CUDA streams do nothing: a CPU does everything at once.
- With one rank, another that does as this one does is taken for granted (``skip_dp_coordination``).
- One microbatch hands over to the next between attention and MLP of every layer. On a GPU, the all-to-all of
  the experts does so in the MLP.
"""

from __future__ import annotations

import functools
import inspect
import types
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from cpu_engine import Engine

MOST_UBATCHES = 3
_MLPS = ("mlp", "feed_forward", "block_sparse_moe")


def let_cut() -> None:
    """Take out of vLLM's way what only a GPU or several ranks have; before the engine is made."""
    from vllm.utils import torch_utils
    from vllm.v1.worker.gpu import attn_utils, ubatch_utils

    # Of metadata builders there is one per microbatch.
    attn_utils.get_num_ubatches = lambda config: MOST_UBATCHES
    torch_utils.prev_set_stream = lambda stream: None
    # A thread chooses its device: None here.
    torch.accelerator.set_device_index = lambda index: None
    ubatch_utils.create_sm_control_context = lambda config: nullcontext()
    # For the all-to-all of the experts.
    ubatch_utils.DPMetadata = types.SimpleNamespace(make=lambda *args: None)


def attach(engine: Engine) -> None:
    """Give ``engine`` vLLM's runners of microbatches, and let the ranks' vote reach the step."""
    from vllm.v1.worker import ubatching
    from vllm.v1.worker.dp_utils import skip_dp_coordination
    from vllm.v1.worker.gpu import model_runner as module

    runner = engine.runner
    # vLLM's own, also where an engine before this one has put another in its place.
    dispatch = inspect.unwrap(module.dispatch_cg_and_sync_dp)
    prepare_inputs = runner.prepare_inputs

    @functools.wraps(dispatch)
    def dispatch_cg_and_sync_dp(
        manager: Any,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        dp_size: int,
        dp_rank: int,
        **kwargs: Any,
    ) -> Any:
        batch = (manager, num_reqs, num_tokens, uniform_token_count)
        engine.allowed = kwargs["allow_ubatching"]
        engine.votes += 1
        if engine.ranks is not None:
            decided = dispatch(*batch, *engine.ranks, **kwargs)
        else:
            with skip_dp_coordination():
                decided = dispatch(*batch, 2, 0, **kwargs)
        cut = decided[0].num_ubatches > 1
        assert engine.ranks or cut == (engine.allowed and num_tokens >= engine.min_tokens)
        engine.steps.split += cut and num_reqs > 1
        return decided

    @functools.wraps(prepare_inputs)
    def note_inputs(*args: Any, **kwargs: Any) -> Any:
        input_batch = prepare_inputs(*args, **kwargs)
        engine.note_step(input_batch.req_ids, input_batch.num_tokens)
        return input_batch

    def hand_over(*_: Any) -> None:
        if ubatching.dbo_enabled():
            engine.steps.hand_overs += 1
            ubatching.dbo_yield()

    module.dispatch_cg_and_sync_dp = dispatch_cg_and_sync_dp
    runner.prepare_inputs = note_inputs
    mlps = [layer for name, layer in runner.model.named_modules() if name.rpartition(".")[2] in _MLPS]
    assert mlps, "no layer to hand over in"
    for mlp in mlps:
        mlp.register_forward_pre_hook(hand_over)
    runner.all_ubatch_runners = {
        num_ubatches: _ubatch_runner(runner, num_ubatches) for num_ubatches in range(2, MOST_UBATCHES + 1)
    }


def set(engine: Engine, *, dbo: bool, num_ubatches: int, vllm_guard: bool, threshold: int | None) -> None:
    """What `Engine.set` is told, but for what the ``parallel_config`` says."""
    engine.runner.ubatch_runner = engine.runner.all_ubatch_runners[num_ubatches] if dbo else None


def keep_company(engine: Engine) -> None:
    """Run vLLM's dummy batch of an idle rank."""
    runner = engine.runner
    runner._dummy_run(runner.decode_query_len, uniform_decode=True)


def _ubatch_runner(runner: Any, num_ubatches: int) -> Any:
    """vLLM's ``maybe_build_ubatch_runner`` without its condition, more than one data-parallel rank."""
    from vllm.utils.torch_utils import _StreamPlaceholder
    from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner

    class Stream(_StreamPlaceholder):
        """vLLM's own stand-in for a stream, with the arguments of a CUDA stream."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

    config = runner.parallel_config
    config.ubatch_size, stream = num_ubatches, torch.cuda.Stream
    torch.cuda.Stream = Stream
    try:
        return UBatchRunner(
            runner.vllm_config,
            runner.device,
            runner.model_state,
            runner.attn_groups,
            runner.kv_cache_config,
            runner.max_num_reqs,
        )
    finally:
        torch.cuda.Stream = stream
        config.ubatch_size = 0
