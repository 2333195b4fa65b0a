"""`UBatchGuardMixin`: an exact guard for any model runner that has vLLM's method names.

``class MyRunner(UBatchGuardMixin, GPUModelRunner)`` guards vLLM's Model Runner V1 and V2, and any runner of
that shape; the vLLM plugin puts the same hooks on vLLM's own classes. Nothing here imports torch or vLLM. The
hooks go around the methods as the finished class has them, so around its own overrides too.

A runner of the V1 shape (``vllm/v1/worker/gpu_model_runner.py``) has

==========================================  ================================================================
``_update_states(scheduler_output)``        takes in the scheduler's changes; calls the next at its end
``_may_reorder_batch(scheduler_output)``    the batch is complete, its order is not yet used
``_allow_microbatching(num_reqs, counts)``  this rank's vote; ``counts``: scheduled tokens, int32
                                            ``[num_reqs]``
``input_batch.req_ids``                     request ids in batch order
``input_batch.num_computed_tokens_cpu``     int32 or int64, shape ``[>= num_reqs]``
``input_batch.swap_states(i, j)``           two requests change places in the batch
``parallel_config``                         ``use_ubatching``, ``num_ubatches``; read anew in every step
``kv_cache_config``                         ``num_blocks``, ``kv_cache_groups[g].kv_cache_spec``; see
                                            `ubatch_guard.kv_cache_groups`
``reorder_batch_threshold`` (optional)      longest query that counts as a decode, or None
``attn_groups`` (optional)                  per KV cache group, objects with a ``backend`` class; see
                                            `ubatch_guard.vllm.attention_backends`
``requests`` (optional)                     id -> object with ``block_ids``: the mirror is made anew from it
``input_batch.block_table.block_tables``    per group ``get_numpy_array()`` and ``num_blocks_per_row``:
(optional)                                  compared with the mirror when asked to verify
==========================================  ================================================================

and ``scheduler_output`` has vLLM's ``scheduled_new_reqs`` (``req_id``, ``block_ids``,
``num_computed_tokens``), ``scheduled_cached_reqs`` (``req_ids``, ``new_block_ids``,
``num_computed_tokens`` and, if it has any, ``resumed_req_ids``), ``num_scheduled_tokens``,
``finished_req_ids`` and, if it has any, ``preempted_req_ids``. If the engine loads KV, so that a load can
fail, ``kv_connector_metadata`` is not None; None says that it loads none, and saves a look at every step.
Only requests that are new or resumed in a step, or set back by a failed load, may read what others write in
it.

A runner of the V2 shape (``vllm/v1/worker/gpu/model_runner.py``) has ``finish_requests(scheduler_output)``,
called first in a step; ``gather_batch_req_state(scheduler_output, dummy_run)``, which answers the batch as
a named tuple (``req_ids``, ``num_scheduled_tokens``, ``num_tokens``, ``idx_mapping_np`` and, optional,
``is_prefilling_np``) and one more thing; ``execute_model``; ``req_states.num_computed_tokens_np``;
``decode_query_len``; and ``ubatch_runner``, whose absence is its vote "no". What `V1` and `V2` look for in
vLLM is in ``contract`` of ``ubatch_guard.vllm.v1`` and ``v2``.

Where both a subclass and the plugin hook a runner, the second hook finds nothing left to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ubatch_guard.runner.guard import RunnerGuard
from ubatch_guard.settings import Settings
from ubatch_guard.step import CutRange
from ubatch_guard.vllm.generations import generation_of, runner_guard
from ubatch_guard.vllm.hooking import HookPointError, hook, lacking

__all__ = ["HookPointError", "UBatchGuardMixin", "runner_guard"]


class UBatchGuardMixin:
    """Guards a runner; goes before the runner in the bases.

    Attributes:
        ubatch_guard_settings: What is asked of the guard, on the class or on an instance before its first
            step; by default what the environment says when the class is made.
        ubatch_guard_cuts: The cuts that a step of ``(num_tokens, num_ubatches)`` can get, where the runner
            cuts otherwise than vLLM does, such as `ubatch_guard.feasible_cuts` as a static method. None:
            vLLM's own cuts for a runner that leaves the cutting to vLLM, every cut for any other.

    Raises:
        SettingsError: On making the class, when the environment is malformed.
        HookPointError: On making the class, when it has some of the methods that are needed and not all.
    """

    ubatch_guard_settings: Settings | None = None
    ubatch_guard_cuts: Callable[[int, int], CutRange] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.ubatch_guard_settings is None:
            cls.ubatch_guard_settings = Settings.from_environment()
        generation = generation_of(cls)
        if generation is None:
            # A base of a runner, not a runner yet.
            return
        if names := lacking(cls, generation):
            raise HookPointError(f"{cls.__name__} lacks {', '.join(names)}: it cannot be guarded")
        hook(cls, generation)

    @property
    def ubatch_guard(self) -> RunnerGuard | None:
        """The guard with its counters and mirror; None when it is off."""
        return runner_guard(self)
