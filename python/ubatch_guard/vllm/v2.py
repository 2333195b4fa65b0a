"""Model Runner V2 (``vllm/v1/worker/gpu/model_runner.py``): microbatches since vLLM 0.30, alone since 0.34.

V2 sorts each step's batch by query length, readers of a cached prefix before their writers, and has no guard
of its own: ``execute_model`` votes ``self.ubatch_runner is not None``. So a vote "no" takes the
``ubatch_runner`` away until the step is over.

The scheduler's own order is a safe one (docs/scheduler-order.md): running requests in any order, then the new
ones as they were scheduled. So in a step without new requests nothing is asked. With new ones, their rows and
those of requests still being prefilled say whether V2's order has an unsafe cut; only then the order changes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ubatch_guard.kv_cache_groups import EngineGroups
from ubatch_guard.runner.batch import Batch
from ubatch_guard.runner.guard import RunnerGuard
from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy
from ubatch_guard.trace.records import BlockIds
from ubatch_guard.vllm import parallel_config
from ubatch_guard.vllm.attach import Attachment, attach, attachment_of
from ubatch_guard.vllm.attention_backends import attention_groups, order_constraint_of
from ubatch_guard.vllm.contract import Needs, find_method
from ubatch_guard.vllm.cut_check import first_read_of_a_later_write
from ubatch_guard.vllm.followed_rows import AllRows, NewRows
from ubatch_guard.vllm.generation import Generation, Hook

_DECIDES = "execute_model"


def guard_of(runner: Any) -> RunnerGuard | None:
    """The guard of a runner of the V2 shape; None: it is off."""
    return attachment_of(runner, _make_rows).guard


def _make_rows(runner: Any, groups: EngineGroups, settings: Settings) -> AllRows:
    if settings.policy is Policy.REORDER:
        return NewRows(groups, getattr(runner, "decode_query_len", 1))
    return AllRows(groups, lambda: _engine_rows(runner), says_when_it_loads=True)


def _engine_rows(runner: Any) -> Iterable[tuple[str, BlockIds]]:
    """V2's rows live on the device: this waits for it, at the start and after something went wrong."""
    states, tables = runner.req_states, runner.block_tables
    lengths = tables.num_blocks.np
    rows = [table.gpu.cpu().numpy() for table in tables.block_tables]
    # Kernels may be given smaller blocks than the scheduler hands out (0.30 to 0.33).
    parts = getattr(tables, "blocks_per_kv_block", [1] * len(rows))
    return [
        (
            req_id,
            [
                rows[group][index, : lengths[group, index] : parts[group]] // parts[group]
                for group in range(len(rows))
            ],
        )
        for req_id, index in states.req_id_to_index.items()
    ]


# The hooks: each takes the runner and the method it goes around.


def _finish_requests(runner: Any, upstream: Callable[..., Any], scheduler_output: Any) -> Any:
    if (guard := attach(runner, _make_rows).guard) is not None:
        if runner.ubatch_runner is not None or guard.trace.on:
            guard.observe(scheduler_output)
        else:
            # No cut can come.
            guard.skip()
    return upstream(scheduler_output)


def _gather_batch_req_state(
    runner: Any, upstream: Callable[..., Any], scheduler_output: Any, dummy_run: bool
) -> Any:
    gathered = upstream(scheduler_output, dummy_run)
    attachment = attachment_of(runner, _make_rows)
    guard = attachment.guard
    state = gathered[0]
    if guard is None or state is None or not guard.step_open:
        return gathered
    if runner.ubatch_runner is None:
        if guard.trace.on:
            with guard.guarded("the step could not be read"):
                guard.watch(_batch(runner, guard, scheduler_output, gathered), True, False)
        return gathered
    if attachment.watched is not runner.ubatch_runner:
        _watch_cuts(runner, attachment)
    allowed = None
    with guard.guarded("the step could not be read"):
        gathered, allowed = _decide(runner, guard, scheduler_output, gathered)
    if allowed is None:
        allowed = guard.refuse()
    if not allowed and guard.policy is not Policy.OBSERVE:
        _withhold(runner, attachment)
    return gathered


def _execute_model(runner: Any, upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return upstream(*args, **kwargs)
    finally:
        attachment = attachment_of(runner, _make_rows)
        if attachment.withheld is not None:
            runner.ubatch_runner, attachment.withheld = attachment.withheld, None
        if attachment.guard is not None:
            attachment.guard.settle(False)


HOOKS: dict[str, Hook] = {
    "finish_requests": _finish_requests,
    "gather_batch_req_state": _gather_batch_req_state,
    _DECIDES: _execute_model,
}


def _withhold(runner: Any, attachment: Attachment) -> None:
    attachment.withheld, runner.ubatch_runner = runner.ubatch_runner, None


def _watch_cuts(runner: Any, attachment: Attachment) -> None:
    """Go around ``prepare`` of what runs the microbatches: it is called when a step is really cut."""
    attachment.watched = runner.ubatch_runner
    prepare = getattr(runner.ubatch_runner, "prepare", None)
    if prepare is None or hasattr(prepare, "ubatch_guard"):
        return

    def prepare_watched(batch: Any, block_tables: Any, slot_mappings: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(batch, block_tables, slot_mappings, *args, **kwargs)
        guard = guard_of(runner)
        # Not for dummy and capture runs.
        if guard is not None and guard.step_running and guard.step_voted:
            guard.settle(True, [ubatch.token_slice.stop for ubatch in prepared.slices[:-1]])
            if guard.cut_check_due():
                with guard.guarded("the cut could not be checked"):
                    _check_cut(runner, guard, batch, block_tables, slot_mappings, prepared.slices)
        return prepared

    prepare_watched.ubatch_guard = True  # type: ignore[attr-defined]
    runner.ubatch_runner.prepare = prepare_watched


def _decide(
    runner: Any, guard: RunnerGuard, scheduler_output: Any, gathered: tuple[Any, ...]
) -> tuple[tuple[Any, ...], bool]:
    """Order the gathered batch and vote on it."""
    state = gathered[0]
    num_reqs, num_tokens = len(state.req_ids), int(state.num_tokens)
    if not guard.must_look():
        eligible = parallel_config.eligible(
            runner.parallel_config, num_tokens, state.num_scheduled_tokens, runner.decode_query_len
        )
        return gathered, guard.vote_without_readers(num_reqs, eligible)
    if parallel_config.too_small(runner, _DECIDES, num_tokens) and not guard.trace.on:
        # No cut can come, but where requests stand is followed from step to step.
        _follow(runner, guard, state)
        return gathered, guard.vote_without_readers(num_reqs, False)
    batch = _batch(runner, guard, scheduler_output, gathered)
    if (order := guard.plan(batch)) is not None:
        gathered = (_permuted(state, order.permutation), *gathered[1:])
        batch = _batch(runner, guard, scheduler_output, gathered)
    if guard.policy is Policy.OBSERVE:
        guard.watch(batch, True, True)
        return gathered, True
    return gathered, guard.vote(batch)


def _batch(runner: Any, guard: RunnerGuard, scheduler_output: Any, gathered: tuple[Any, ...]) -> Batch:
    state, uniform_query_len = gathered[0], gathered[1]
    config, rows = runner.parallel_config, guard.rows
    counts = state.num_scheduled_tokens
    num_computed_tokens = _follow(runner, guard, state)
    num_tokens = int(state.num_tokens)
    ubatches = parallel_config.num_ubatches(config)
    threshold = _decode_threshold(runner)
    return Batch(
        req_ids=state.req_ids,
        num_computed_tokens=num_computed_tokens,
        num_scheduled_tokens=counts,
        num_ubatches=ubatches,
        cuts=parallel_config.own_cuts(
            runner,
            _DECIDES,
            num_tokens,
            ubatches,
            uniform_query_len if isinstance(uniform_query_len, int) else None,
        ),
        decode_threshold=threshold,
        decode_query_len=runner.decode_query_len,
        order_constraint=lambda: order_constraint_of(runner, threshold),
        eligible=parallel_config.eligible(config, num_tokens, counts, runner.decode_query_len),
        refusal=_refusal(runner, guard, scheduler_output),
        unsure=None if rows.complete else _unsure(runner, guard, state, num_computed_tokens),
        as_scheduled=lambda: _as_scheduled(rows.new, state.req_ids, scheduler_output),
    )


def _follow(runner: Any, guard: RunnerGuard, state: Any) -> Any:
    """Find who is set back, which a refusal goes by, once in a step; ``num_computed_tokens`` of the batch."""
    num_computed_tokens = runner.req_states.num_computed_tokens_np[state.idx_mapping_np]
    guard.rows.may_read(state.req_ids, num_computed_tokens, getattr(state, "is_prefilling_np", None))
    return num_computed_tokens


def _refusal(runner: Any, guard: RunnerGuard, scheduler_output: Any) -> str | None:
    """What no order helps against."""
    if (
        getattr(runner, "adaptive_verification", None) is not None
        and scheduler_output.scheduled_spec_decode_tokens
    ):
        # It asserts the order that it has, and trims the batch after the requests of a slice were chosen
        # (``v1/worker/gpu/spec_decode/adaptive_verification.py``, ``compact_batch``).
        return "adaptive_verification"
    if guard.rows.set_back:
        # After a failed load V2 takes over the counts on the host and not on the device.
        return "set_back"
    return None


def _unsure(runner: Any, guard: RunnerGuard, state: Any, num_computed_tokens: Any) -> str | None:
    """Why the rows of prefilling requests do not tell whether the step is safe as it stands."""
    rows = guard.rows
    assert isinstance(rows, NewRows)
    rows.take_in()
    req_ids, counts = state.req_ids, state.num_scheduled_tokens
    prefilling = getattr(state, "is_prefilling_np", None)
    if prefilling is None:
        prefilling = counts > runner.decode_query_len
        prefilling |= np.fromiter((req_id in rows.new for req_id in req_ids), np.bool_, len(req_ids))
    places = np.flatnonzero(prefilling)
    if not rows.find(req_ids, places):
        # One was being prefilled before the guard was there.
        return "unknown_request"
    new = rows.new
    readers = [place for place in places.tolist() if req_ids[place] in new]
    if not readers or readers[0] == len(req_ids) - len(readers):
        return None
    # A decode behind a new request may fill, in this very step, a block that the new one has hit.
    others = np.flatnonzero(~prefilling)
    others = others[others > readers[0]]
    computed, scheduled = num_computed_tokens[others], counts[others]
    furthest = int(num_computed_tokens[readers].max())
    for group in rows.groups.groups:
        span = group.tokens_per_column
        filled = (computed + scheduled) // span
        if bool(((filled > computed // span) & (computed // span * span < furthest)).any()):
            return "unknown_row"
    return None


def _as_scheduled(new: Iterable[str], req_ids: list[str], scheduler_output: Any) -> list[int]:
    """Running requests in V2's order, then the new ones as the scheduler took them, as batch positions."""
    new = set(new)
    place = {req_id: position for position, req_id in enumerate(req_ids)}
    running = [position for position, req_id in enumerate(req_ids) if req_id not in new]
    return running + [place[req_id] for req_id in scheduler_output.num_scheduled_tokens if req_id in new]


def _decode_threshold(runner: Any) -> int:
    """Longest query that an attention backend runs as a decode, in tokens."""
    threshold = int(runner.decode_query_len)
    for group in attention_groups(runner):
        for builder in getattr(group, "metadata_builders", ())[:1]:
            threshold = max(threshold, getattr(builder, "reorder_batch_threshold", None) or 0)
    return threshold


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


def _check_cut(
    runner: Any, guard: RunnerGuard, input_batch: Any, block_tables: Any, slot_mappings: Any, slices: Any
) -> None:
    """See that no microbatch of a step that is being cut reads what a later one writes."""
    config = runner.parallel_config
    if any(parallel_config.context_parallel(config, kind) for kind in ("decode", "prefill")):
        guard.report.once("cut_check", "cuts are not checked under context parallelism")
        return
    guard.counters.verified += 1
    tables = runner.block_tables
    block_sizes = getattr(tables, "kernel_block_sizes", tables.block_sizes)
    found = first_read_of_a_later_write(
        input_batch.query_start_loc_np[: input_batch.num_reqs + 1],
        input_batch.seq_lens[: input_batch.num_reqs].cpu().numpy(),
        [ubatch.token_slice.stop for ubatch in slices[:-1]],
        [
            (group, block_sizes[index], block_tables[index], slot_mappings[index])
            for index, group in zip(guard.rows.groups.indices, guard.rows.groups.groups, strict=True)
        ],
    )
    if found is not None:
        group, cut, reader, writer, block = found
        guard.found(
            f"in a step cut at token {cut}, {input_batch.req_ids[reader]!r} reads block {block} of KV cache "
            f"group {guard.rows.groups.indices[group]}, which {input_batch.req_ids[writer]!r} writes in a "
            "later microbatch"
        )


def _vote_of(cls: ast.ClassDef) -> tuple[str | None, list[str]]:
    """V2 votes by the keyword ``allow_ubatching``, which has to be "no" without ``self.ubatch_runner``."""
    execute_model = find_method(cls, _DECIDES)
    for node in ast.walk(execute_model) if execute_model else ():
        if isinstance(node, ast.keyword) and node.arg == "allow_ubatching":
            terms = node.value.values if isinstance(node.value, ast.BoolOp) else [node.value]
            both = not isinstance(node.value, ast.BoolOp) or isinstance(node.value.op, ast.And)
            if both and any(_says_ubatch_runner_is_not_none(term) for term in terms):
                return "ubatch_runner", []
    return None, [f"{_DECIDES} voting allow_ubatching=(self.ubatch_runner is not None and ...)"]


def _says_ubatch_runner_is_not_none(term: ast.expr) -> bool:
    return (
        isinstance(term, ast.Compare)
        and isinstance(term.left, ast.Attribute)
        and term.left.attr == "ubatch_runner"
        and isinstance(term.left.value, ast.Name)
        and term.left.value.id == "self"
        and len(term.ops) == 1
        and isinstance(term.ops[0], ast.IsNot)
        and isinstance(term.comparators[0], ast.Constant)
        and term.comparators[0].value is None
    )


def _microbatches(package: Path) -> bool:
    # Before 0.30 V2 has no microbatches.
    return (package / "v1/worker/gpu/ubatch_utils.py").exists()


V2 = Generation(
    name="v2",
    module="vllm.v1.worker.gpu.model_runner",
    cls="GPUModelRunner",
    mark="gather_batch_req_state",
    hooks=HOOKS,
    required=(("finish_requests",), ("gather_batch_req_state",), (_DECIDES,)),
    contract=(
        Needs(
            "vllm.v1.worker.gpu.model_runner",
            "GPUModelRunner",
            (
                "finish_requests(scheduler_output)",
                "gather_batch_req_state(scheduler_output, dummy_run)",
                f"{_DECIDES}(scheduler_output)",
                "ubatch_runner",
                "req_states",
                "block_tables",
                "decode_query_len",
                "attn_groups",
                "kv_cache_config",
                "parallel_config",
            ),
        ),
        Needs(
            "vllm.v1.worker.gpu.model_runner",
            "BatchReqState",
            ("req_ids", "num_scheduled_tokens", "num_tokens", "idx_mapping_np", "is_prefilling_np"),
        ),
        Needs("vllm.v1.worker.gpu.states", "RequestState", ("num_computed_tokens_np", "req_id_to_index")),
        Needs("vllm.v1.worker.gpu.block_table", "BlockTables", ("block_sizes", "block_tables", "num_blocks")),
        Needs(
            "vllm.v1.worker.gpu.ubatch_utils",
            "UBatchRunner",
            ("prepare(input_batch, block_tables, slot_mappings)",),
        ),
        Needs("vllm.v1.worker.gpu.ubatch_utils", "UBatchState", ("slices",)),
        Needs("vllm.v1.worker.gpu.input_batch", "InputBatch", ("query_start_loc_np", "seq_lens", "req_ids")),
        Needs(
            "vllm.v1.core.sched.output",
            "SchedulerOutput",
            (
                "scheduled_new_reqs",
                "scheduled_cached_reqs",
                "num_scheduled_tokens",
                "scheduled_spec_decode_tokens",
                "finished_req_ids",
                "preempted_req_ids",
                "kv_connector_metadata",
            ),
        ),
        Needs(
            "vllm.v1.core.sched.output",
            "CachedRequestData",
            ("req_ids", "new_block_ids", "num_computed_tokens"),
        ),
        Needs(
            "vllm.v1.core.sched.output",
            "NewRequestData",
            ("req_id", "block_ids", "num_computed_tokens", "prefill_token_ids"),
        ),
    ),
    vote=_vote_of,
    guard_of=guard_of,
    microbatches=_microbatches,
)
