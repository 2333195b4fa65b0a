"""`UBatchGuardMixin`: an exact guard for any model runner that has vLLM's method names.

``class MyRunner(UBatchGuardMixin, GPUModelRunner)`` guards vLLM's Model Runner V1 and V2, and any runner of
that shape; the vLLM plugin puts the same hooks on vLLM's own classes. Nothing here imports torch or vLLM.

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
                                            `ubatch_guard.order_constraint`
``requests`` (optional)                     id -> object with ``block_ids``: the mirror is made anew from it
``input_batch.block_table.block_tables``    per group ``get_numpy_array()`` and ``num_blocks_per_row``:
(optional)                                  compared with the mirror when asked to verify
==========================================  ================================================================

and ``scheduler_output`` has vLLM's ``scheduled_new_reqs`` (``req_id``, ``block_ids``,
``num_computed_tokens``), ``scheduled_cached_reqs`` (``req_ids``, ``new_block_ids``,
``num_computed_tokens``, ``resumed_req_ids``), ``num_scheduled_tokens``, ``finished_req_ids`` and, if it has
any, ``preempted_req_ids``, and, if it loads KV, so that a load can fail, a ``kv_connector_metadata`` that is
not None.

A runner of the V2 shape (``vllm/v1/worker/gpu/model_runner.py``) has ``finish_requests(scheduler_output)``,
called first in a step; ``gather_batch_req_state(scheduler_output, dummy_run)``, which answers the batch as
a named tuple and one more thing; ``execute_model``; ``req_states.num_computed_tokens_np``;
``decode_query_len``; and ``ubatch_runner``, whose absence is its vote "no".

Where both a subclass and the plugin hook a runner, the second hook finds nothing left to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ubatch_guard.kv_cache_groups import EngineGroups, read_groups
from ubatch_guard.order_constraint import order_constraint
from ubatch_guard.runner_guard import Batch, Rows, RunnerGuard
from ubatch_guard.settings import Settings
from ubatch_guard.step import OrderConstraint

_GUARD = "_ubatch_guard"
_SETTINGS = "ubatch_guard_settings"


class UBatchGuardMixin:
    """Guards a runner; goes before the runner in the bases.

    Attributes:
        ubatch_guard_settings: What is asked of the guard, on the class or on an instance before its first
            step; by default what the environment says when the class is made.

    Raises:
        SettingsError: On making the class, when the environment is malformed.
    """

    ubatch_guard_settings: Settings | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.ubatch_guard_settings is None:
            cls.ubatch_guard_settings = Settings.from_environment()

    @property
    def ubatch_guard(self) -> RunnerGuard | None:
        """The guard with its counters and mirror; None when it is off."""
        return runner_guard(self)

    # V1.

    def _update_states(self, scheduler_output: Any) -> Any:
        return _update_states(self, super()._update_states, scheduler_output)  # type: ignore[misc]

    def _may_reorder_batch(self, scheduler_output: Any) -> None:
        _may_reorder_batch(self, super()._may_reorder_batch, scheduler_output)  # type: ignore[misc]

    def _allow_microbatching(self, num_reqs: int, num_scheduled_tokens_np: npt.NDArray[np.int32]) -> bool:
        upstream = getattr(super(), "_allow_microbatching", _allow)
        return _allow_microbatching(self, upstream, num_reqs, num_scheduled_tokens_np)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        upstream = super()._determine_batch_execution_and_padding  # type: ignore[misc]
        if hasattr(super(), "_allow_microbatching"):
            return upstream(*args, **kwargs)
        return _determine_batch_execution_and_padding(self, upstream, *args, **kwargs)

    # V2.

    def finish_requests(self, scheduler_output: Any) -> Any:
        """Learn of the scheduler's changes, then go on."""
        return _finish_requests(self, super().finish_requests, scheduler_output)  # type: ignore[misc]

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        """Order the gathered batch and vote on it."""
        upstream = super().gather_batch_req_state  # type: ignore[misc]
        return _gather_batch_req_state(self, upstream, scheduler_output, dummy_run)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; a vote "no" ends with it."""
        return _execute_model(self, super().execute_model, *args, **kwargs)  # type: ignore[misc]


def runner_guard(runner: Any) -> RunnerGuard | None:
    """The guard of ``runner``, made at the first call; None when it is off. Never raises in a step."""
    settings: Settings | None = getattr(runner, _SETTINGS, None)
    if settings is None:
        settings = runner.__dict__[_SETTINGS] = Settings.from_environment()
    if settings.policy is None:
        return None
    kv_cache_config = getattr(runner, "kv_cache_config", None)
    made_for, guard = runner.__dict__.get(_GUARD, (None, None))
    if guard is not None and made_for is kv_cache_config and guard.settings is settings:
        return guard  # type: ignore[no-any-return]
    parallel_config = getattr(runner, "parallel_config", None)
    groups: EngineGroups | Exception
    try:
        groups = read_groups(kv_cache_config, getattr(parallel_config, "decode_context_parallel_size", 1))
    except Exception as error:
        groups = error
    guard = RunnerGuard(
        groups,
        settings,
        engine_rows=lambda: _engine_rows(runner),
        name=str(getattr(parallel_config, "data_parallel_rank", 0)),
    )
    runner.__dict__[_GUARD] = (kv_cache_config, guard)
    return guard


# The hooks: each takes the runner and the method it goes around.


def _update_states(runner: Any, upstream: Callable[..., Any], scheduler_output: Any) -> Any:
    if (guard := runner_guard(runner)) is not None:
        guard.observe(scheduler_output)
    return upstream(scheduler_output)


def _may_reorder_batch(runner: Any, upstream: Callable[..., Any], scheduler_output: Any) -> None:
    upstream(scheduler_output)
    guard = runner_guard(runner)
    if guard is None or not guard.may_plan or not _microbatches(runner):
        return
    order = None
    with guard.guarded("no order could be planned"):
        req_ids = runner.input_batch.req_ids
        counts = scheduler_output.num_scheduled_tokens
        num_scheduled_tokens = np.fromiter(map(counts.__getitem__, req_ids), np.int32, len(req_ids))
        order = guard.plan(_v1_batch(runner, len(req_ids), num_scheduled_tokens))
    if order is not None:
        # The runner's own bookkeeping: what it raises is no matter of the guard's.
        for i, j in order.swaps:
            runner.input_batch.swap_states(i, j)


def _allow_microbatching(
    runner: Any, upstream: Callable[..., bool], num_reqs: int, num_scheduled_tokens_np: npt.NDArray[np.int32]
) -> bool:
    def ask_engine() -> bool:
        return upstream(num_reqs, num_scheduled_tokens_np)

    guard = runner_guard(runner)
    if guard is None:
        return ask_engine()
    with guard.guarded("the step could not be read"):
        batch = _v1_batch(runner, num_reqs, num_scheduled_tokens_np[:num_reqs])
        if not _microbatches(runner):
            return guard.watch(batch, ask_engine)
        if guard.verify_due():
            _verify_v1(runner, guard, batch)
        return guard.vote(batch, ask_engine)
    return guard.vote_undecided()


def _determine_batch_execution_and_padding(
    runner: Any, upstream: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Vote by the keyword that carries it, in releases before ``_allow_microbatching``."""
    guard = runner_guard(runner)
    # Dummy and capture runs come here without a scheduled step.
    if guard is None or not guard.step_open:
        return upstream(*args, **kwargs)
    step = inspect.signature(upstream).bind(*args, **kwargs)
    asked = bool(step.arguments.get("allow_microbatching", True))
    num_reqs, counts = step.arguments["num_reqs"], step.arguments["num_scheduled_tokens_np"]
    allowed = _allow_microbatching(runner, lambda *_: asked, num_reqs, counts)
    step.arguments["allow_microbatching"] = asked and allowed
    # By keyword: its parameters move from release to release.
    return upstream(**step.arguments)


def _finish_requests(runner: Any, upstream: Callable[..., Any], scheduler_output: Any) -> Any:
    if (guard := runner_guard(runner)) is not None:
        guard.observe(scheduler_output)
    return upstream(scheduler_output)


def _gather_batch_req_state(
    runner: Any, upstream: Callable[..., Any], scheduler_output: Any, dummy_run: bool
) -> Any:
    gathered = upstream(scheduler_output, dummy_run)
    guard = runner_guard(runner)
    state = gathered[0]
    if guard is None or state is None or guard.step_voted:
        return gathered
    on = _microbatches(runner)
    allowed = False
    with guard.guarded("the step could not be read"):
        batch = _v2_batch(runner, state)
        if on and (order := guard.plan(batch)) is not None:
            state = _permuted(state, order.permutation)
            batch = _v2_batch(runner, state)
            gathered = (state, *gathered[1:])
        if on and guard.verify_due():
            _verify_v2(runner, guard, batch, state)
        # V2 has no guard of its own to ask.
        allowed = guard.vote(batch, _allow) if on else guard.watch(batch, _allow)
    if on and not allowed:
        _withhold_ubatch_runner(runner)
    return gathered


def _execute_model(runner: Any, upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return upstream(*args, **kwargs)
    finally:
        _return_ubatch_runner(runner)


V1_HOOKS: dict[str, Callable[..., Any]] = {
    "_update_states": _update_states,
    "_may_reorder_batch": _may_reorder_batch,
    "_allow_microbatching": _allow_microbatching,
}
"""Method name -> hook, for a runner of the V1 shape."""

V1_KEYWORD_HOOKS: dict[str, Callable[..., Any]] = {
    "_update_states": _update_states,
    "_may_reorder_batch": _may_reorder_batch,
    "_determine_batch_execution_and_padding": _determine_batch_execution_and_padding,
}
"""The same for releases without ``_allow_microbatching``."""

V2_HOOKS: dict[str, Callable[..., Any]] = {
    "finish_requests": _finish_requests,
    "gather_batch_req_state": _gather_batch_req_state,
    "execute_model": _execute_model,
}
"""The same for the V2 shape."""


def _allow(*_: Any) -> bool:
    return True


def _microbatches(runner: Any) -> bool:
    """Whether a step may be cut at all, by the configuration as it is in this step."""
    config = getattr(runner, "parallel_config", None)
    if config is None:
        return True
    on = getattr(config, "use_ubatching", None)
    return bool(getattr(config, "enable_dbo", False) if on is None else on) or (
        getattr(runner, "ubatch_runner", None) is not None
    )


def _v1_batch(runner: Any, num_reqs: int, num_scheduled_tokens: npt.NDArray[np.int32]) -> Batch:
    input_batch = runner.input_batch
    threshold = getattr(runner, "reorder_batch_threshold", None)
    config = getattr(runner, "parallel_config", None)
    num_tokens = int(num_scheduled_tokens.sum())
    decode_query_len = getattr(runner, "uniform_decode_query_len", 1)
    return Batch(
        req_ids=input_batch.req_ids[:num_reqs],
        num_computed_tokens=input_batch.num_computed_tokens_cpu[:num_reqs],
        num_scheduled_tokens=num_scheduled_tokens,
        num_tokens=num_tokens,
        num_ubatches=max(2, getattr(config, "num_ubatches", 2)),
        decode_threshold=threshold or 1,
        order_constraint=lambda: _order_constraint(runner, threshold),
        eligible=_eligible(config, num_tokens, num_scheduled_tokens, decode_query_len),
        any_cut=_context_parallel(config, "prefill"),
    )


def _v2_batch(runner: Any, state: Any) -> Batch:
    config = runner.parallel_config
    threshold = runner.decode_query_len
    # Adaptive verification trims ``state.num_tokens`` below the sum.
    num_tokens = int(state.num_scheduled_tokens.sum())
    return Batch(
        req_ids=state.req_ids,
        num_computed_tokens=runner.req_states.num_computed_tokens_np[state.idx_mapping_np],
        num_scheduled_tokens=state.num_scheduled_tokens,
        num_tokens=num_tokens,
        num_ubatches=max(2, config.num_ubatches),
        decode_threshold=threshold,
        order_constraint=lambda: _order_constraint(runner, threshold),
        eligible=_eligible(config, num_tokens, state.num_scheduled_tokens, threshold),
        # Prefill context parallelism and adaptive verification deal the tokens out anew after the vote.
        any_cut=_context_parallel(config, "prefill")
        or getattr(runner, "adaptive_verification", None) is not None,
    )


def _order_constraint(runner: Any, threshold: int | None) -> OrderConstraint:
    backends = [group.backend for groups in getattr(runner, "attn_groups", ()) for group in groups]
    config = getattr(runner, "parallel_config", None)
    context_parallel = _context_parallel(config, "decode") or _context_parallel(config, "prefill")
    return order_constraint(backends, threshold, context_parallel)


def _context_parallel(config: Any, kind: str) -> bool:
    return bool(getattr(config, f"{kind}_context_parallel_size", 1) > 1)


def _eligible(
    config: Any, num_tokens: int, num_scheduled_tokens: npt.NDArray[np.int32], decode_query_len: int
) -> bool:
    """Whether the step is large enough for vLLM to cut (``ubatch_utils.check_ubatch_thresholds``)."""
    decode_tokens = getattr(config, "dbo_decode_token_threshold", 0)
    prefill_tokens = getattr(config, "dbo_prefill_token_threshold", 0)
    if (num_tokens >= decode_tokens) is (num_tokens >= prefill_tokens):
        return bool(num_tokens >= decode_tokens)
    uniform_decode = bool((num_scheduled_tokens == decode_query_len).all())
    return bool(num_tokens >= (decode_tokens if uniform_decode else prefill_tokens))


def _permuted(state: Any, permutation: tuple[int, ...]) -> Any:
    """Reorder the per-request lists and arrays of a named tuple that holds other things too."""
    index = np.asarray(permutation, dtype=np.intp)
    moved: dict[str, Any] = {}
    for name, value in state._asdict().items():
        if isinstance(value, np.ndarray) and len(value) == len(index):
            moved[name] = value[index]
        elif isinstance(value, list) and len(value) == len(index):
            moved[name] = [value[i] for i in permutation]
    return state._replace(**moved)


def _withhold_ubatch_runner(runner: Any) -> None:
    """Vote "no" on V2: it votes ``self.ubatch_runner is not None`` (``execute_model``)."""
    if runner.ubatch_runner is not None:
        runner.__dict__["_ubatch_guard_withheld"] = runner.ubatch_runner
        runner.ubatch_runner = None


def _return_ubatch_runner(runner: Any) -> None:
    withheld = runner.__dict__.pop("_ubatch_guard_withheld", None)
    if withheld is not None:
        runner.ubatch_runner = withheld


def _engine_rows(runner: Any) -> Iterable[tuple[str, Rows]]:
    """``(request id, block ids per group)`` of all live requests, as the runner has them."""
    if hasattr(runner, "requests"):
        return [(req_id, state.block_ids) for req_id, state in runner.requests.items()]
    states, tables = runner.req_states, runner.block_tables
    lengths = tables.num_blocks.np
    rows = [table.gpu.cpu().numpy() for table in tables.block_tables]
    return [
        (req_id, [rows[group][index, : lengths[group, index]] for group in range(len(rows))])
        for req_id, index in states.req_id_to_index.items()
    ]


def _verify_v1(runner: Any, guard: RunnerGuard, batch: Batch) -> None:
    tables = runner.input_batch.block_table.block_tables
    num_reqs = len(batch.req_ids)
    for place, index in enumerate(guard.groups.indices):
        table = tables[index]
        # Before vLLM 0.32 a table may hold the ids of smaller kernel blocks; those cannot be compared.
        if not getattr(table, "use_hybrid_blocks", False):
            guard.compare(
                batch.req_ids, place, table.get_numpy_array()[:num_reqs], table.num_blocks_per_row[:num_reqs]
            )


def _verify_v2(runner: Any, guard: RunnerGuard, batch: Batch, state: Any) -> None:
    """V2's rows live on the device: this waits for it, once every so many steps."""
    tables = runner.block_tables
    for place, index in enumerate(guard.groups.indices):
        rows = tables.block_tables[index].gpu[state.idx_mapping_np].cpu().numpy()
        guard.compare(batch.req_ids, place, rows, tables.num_blocks.np[index, state.idx_mapping_np])
