"""Model Runner V1 (``vllm/v1/worker/gpu_model_runner.py``, up to vLLM 0.33), and runners of its shape.

The vote is the method ``_allow_microbatching`` (0.28 and later), before that the keyword
``allow_microbatching`` of ``_determine_batch_execution_and_padding``. vLLM 0.34 has no V1 any more: this file
is as it was left, and goes with it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ubatch_guard.kv_cache_groups import EngineGroups
from ubatch_guard.runner.batch import Batch
from ubatch_guard.runner.guard import RunnerGuard
from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy
from ubatch_guard.trace.records import BlockIds
from ubatch_guard.vllm import parallel_config
from ubatch_guard.vllm.attach import attach, attachment_of
from ubatch_guard.vllm.attention_backends import order_constraint_of
from ubatch_guard.vllm.contract import Needs, has, members_of
from ubatch_guard.vllm.followed_rows import AllRows
from ubatch_guard.vllm.generation import Generation, Hook

_DECIDES = "_determine_batch_execution_and_padding"
_VOTES = "_allow_microbatching"
_COUNTS = "num_reqs, num_scheduled_tokens_np"


def guard_of(runner: Any) -> RunnerGuard | None:
    """The guard of a runner of the V1 shape; None: it is off."""
    return attachment_of(runner, _make_rows).guard


def _make_rows(runner: Any, groups: EngineGroups, settings: Settings) -> AllRows:
    return AllRows(groups, (lambda: _engine_rows(runner)) if hasattr(runner, "requests") else None)


def _engine_rows(runner: Any) -> Iterable[tuple[str, BlockIds]]:
    return [(req_id, state.block_ids) for req_id, state in runner.requests.items()]


# The hooks: each takes the runner and the method it goes around.


def _update_states(runner: Any, upstream: Callable[..., Any], scheduler_output: Any) -> Any:
    if (guard := attach(runner, _make_rows).guard) is not None:
        if parallel_config.microbatches(runner) or not guard.may_skip:
            guard.observe(scheduler_output)
        else:
            guard.skip()
    return upstream(scheduler_output)


def _may_reorder_batch(runner: Any, upstream: Callable[..., Any], scheduler_output: Any) -> None:
    upstream(scheduler_output)
    guard = guard_of(runner)
    if guard is None or guard.policy is not Policy.REORDER or not guard.must_look():
        return
    order = None
    with guard.guarded("no order could be planned"):
        batch = runner.input_batch
        req_ids = batch.req_ids
        counts = scheduler_output.num_scheduled_tokens
        if (
            parallel_config.microbatches(runner)
            and guard.wants_order(req_ids, batch.num_computed_tokens_cpu[: len(req_ids)])
            and not parallel_config.too_small(runner, _DECIDES, sum(counts.values()))
        ):
            num_scheduled_tokens = np.fromiter(map(counts.__getitem__, req_ids), np.int32, len(req_ids))
            order = guard.plan(_batch(runner, len(req_ids), num_scheduled_tokens))
    if order is not None:
        # The runner's own bookkeeping: what it raises is no matter of the guard's.
        for i, j in order.swaps:
            runner.input_batch.swap_states(i, j)


def _allow_microbatching(
    runner: Any, upstream: Callable[..., bool], num_reqs: int, num_scheduled_tokens_np: npt.NDArray[np.int32]
) -> bool:
    guard = guard_of(runner)
    # The engine's verdict goes through this very hook again, where both subclass and plugin guard it.
    if guard is None or guard.asking_engine:
        return upstream(num_reqs, num_scheduled_tokens_np)
    return _vote(
        runner, guard, lambda: upstream(num_reqs, num_scheduled_tokens_np), num_reqs, num_scheduled_tokens_np
    )


def _determine_batch_execution_and_padding(
    runner: Any, upstream: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """See what was settled; and in releases before ``_allow_microbatching``, vote by the keyword."""
    guard = guard_of(runner)
    # Dummy and capture runs come here without a scheduled step.
    if guard is None or not guard.step_running:
        return upstream(*args, **kwargs)
    if guard.step_voted or hasattr(type(runner), _VOTES):
        decided = upstream(*args, **kwargs)
    else:
        step = inspect.signature(upstream).bind(*args, **kwargs)
        asked = bool(step.arguments.get("allow_microbatching", True))
        num_reqs, counts = step.arguments["num_reqs"], step.arguments["num_scheduled_tokens_np"]
        step.arguments["allow_microbatching"] = asked and _vote(
            runner, guard, lambda: asked, num_reqs, counts
        )
        # By keyword: its parameters move from release to release.
        decided = upstream(**step.arguments)
    should_ubatch = getattr(decided, "should_ubatch", None)
    if should_ubatch is None and isinstance(decided, tuple) and len(decided) > 2:
        should_ubatch = decided[2]
    guard.settle(bool(should_ubatch), _cuts_of(runner, decided) if guard.trace.on and should_ubatch else None)
    return decided


def _cuts_of(runner: Any, decided: Any) -> list[int] | None:
    """Where vLLM's own runner cuts: at multiples of the padded tokens over the microbatches."""
    config = getattr(runner, "parallel_config", None)
    padded = getattr(decided[1], "num_tokens", None)
    if padded is None or parallel_config.own_cuts(runner, _DECIDES, padded, 2) is None:
        return None
    ubatches = parallel_config.num_ubatches(config)
    return [padded // ubatches * place for place in range(1, ubatches)]


HOOKS: dict[str, Hook] = {
    "_update_states": _update_states,
    "_may_reorder_batch": _may_reorder_batch,
    _VOTES: _allow_microbatching,
    _DECIDES: _determine_batch_execution_and_padding,
}


def _vote(
    runner: Any,
    guard: RunnerGuard,
    ask_engine: Callable[[], bool],
    num_reqs: int,
    num_scheduled_tokens_np: npt.NDArray[np.int32],
) -> bool:
    on = parallel_config.microbatches(runner)
    if not on or guard.policy is Policy.OBSERVE:
        # The engine decides, and whatever happens here is not its concern.
        theirs = guard.asking(ask_engine)
        if on or guard.trace.on:
            with guard.guarded("the step could not be read"):
                guard.watch(_batch(runner, num_reqs, num_scheduled_tokens_np[:num_reqs]), theirs, on)
                return theirs
            guard.refuse()
        return theirs
    with guard.guarded("the step could not be read"):
        counts, verify = num_scheduled_tokens_np[:num_reqs], guard.verify_due()
        if not verify and not guard.must_look():
            num_tokens = getattr(guard.scheduled, "total_num_scheduled_tokens", None)
            return guard.vote_without_readers(num_reqs, _eligible(runner, counts, num_tokens))
        step = _batch(runner, num_reqs, counts)
        # Also where no cut can come: where requests stand is followed from step to step.
        guard.rows.may_read(step.req_ids, step.num_computed_tokens)
        too_small = parallel_config.too_small(runner, _DECIDES, int(counts.sum()))
        if too_small and not verify and not guard.trace.on:
            return guard.vote_without_readers(num_reqs, False)
        if verify:
            _verify(runner, guard, step)
        return guard.vote(step, ask_engine)
    return guard.refuse()


def _batch(runner: Any, num_reqs: int, num_scheduled_tokens: npt.NDArray[np.int32]) -> Batch:
    input_batch = runner.input_batch
    threshold = getattr(runner, "reorder_batch_threshold", None)
    config = getattr(runner, "parallel_config", None)
    num_tokens = int(num_scheduled_tokens.sum())
    ubatches = parallel_config.num_ubatches(config)
    return Batch(
        req_ids=input_batch.req_ids[:num_reqs],
        num_computed_tokens=input_batch.num_computed_tokens_cpu[:num_reqs],
        num_scheduled_tokens=num_scheduled_tokens,
        num_ubatches=ubatches,
        cuts=parallel_config.own_cuts(runner, _DECIDES, num_tokens, ubatches),
        decode_threshold=threshold,
        decode_query_len=getattr(runner, "uniform_decode_query_len", 1),
        order_constraint=lambda: order_constraint_of(runner, threshold),
        eligible=_eligible(runner, num_scheduled_tokens, num_tokens),
    )


def _eligible(runner: Any, num_scheduled_tokens: npt.NDArray[np.int32], num_tokens: int | None) -> bool:
    return parallel_config.eligible(
        getattr(runner, "parallel_config", None),
        int(num_scheduled_tokens.sum()) if num_tokens is None else num_tokens,
        num_scheduled_tokens,
        getattr(runner, "uniform_decode_query_len", 1),
    )


def _verify(runner: Any, guard: RunnerGuard, batch: Batch) -> None:
    tables = runner.input_batch.block_table.block_tables
    num_reqs = len(batch.req_ids)
    for place, index in enumerate(guard.rows.groups.indices):
        table = tables[index]
        # Before vLLM 0.32 a table may hold the ids of smaller kernel blocks; those cannot be compared.
        if not getattr(table, "use_hybrid_blocks", False):
            guard.compare(
                batch.req_ids, place, table.get_numpy_array()[:num_reqs], table.num_blocks_per_row[:num_reqs]
            )


def _vote_of(cls: ast.ClassDef) -> tuple[str | None, list[str]]:
    members = members_of(cls)
    vote, needed = f"{_DECIDES}(allow_microbatching=)", f"{_DECIDES}({_COUNTS}, allow_microbatching)"
    if _VOTES in members:
        vote, needed = _VOTES, f"{_VOTES}({_COUNTS})"
    return vote, [] if has(members, needed) else [needed]


def _microbatches(package: Path) -> bool:
    return (package / "v1/worker/ubatch_utils.py").exists()


V1 = Generation(
    name="v1",
    module="vllm.v1.worker.gpu_model_runner",
    cls="GPUModelRunner",
    mark="_update_states",
    hooks=HOOKS,
    required=(("_update_states",), ("_may_reorder_batch",), (_VOTES, _DECIDES)),
    contract=(
        Needs(
            "vllm.v1.worker.gpu_model_runner",
            "GPUModelRunner",
            (
                "_update_states(scheduler_output)",
                "_may_reorder_batch(scheduler_output)",
                f"{_DECIDES}({_COUNTS})",
                "input_batch",
                "requests",
                "reorder_batch_threshold",
                "attn_groups",
                "parallel_config",
            ),
        ),
        Needs(
            "vllm.v1.worker.gpu_input_batch",
            "InputBatch",
            ("req_ids", "num_computed_tokens_cpu", "swap_states", "block_table"),
        ),
        Needs(
            "vllm.v1.core.sched.output",
            "SchedulerOutput",
            (
                "scheduled_new_reqs",
                "scheduled_cached_reqs",
                "num_scheduled_tokens",
                "finished_req_ids",
                "kv_connector_metadata",
            ),
        ),
        Needs(
            "vllm.v1.core.sched.output",
            "CachedRequestData",
            ("req_ids", "new_block_ids", "num_computed_tokens", "resumed_req_ids"),
        ),
        Needs("vllm.v1.core.sched.output", "NewRequestData", ("req_id", "block_ids", "num_computed_tokens")),
    ),
    vote=_vote_of,
    guard_of=guard_of,
    microbatches=_microbatches,
)
