"""The mixin on the torch engine's runner, fed by hand with what a scheduler does only once in a while."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
import shapes

from ubatch_guard.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from ubatch_guard.engine.guarded import GuardedRunner
from ubatch_guard.engine.model import DecoderModel
from ubatch_guard.engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from ubatch_guard.engine.request import SamplingParams
from ubatch_guard.engine.runner import Runner
from ubatch_guard.runner_mixin import runner_guard
from ubatch_guard.settings import Settings
from ubatch_guard.step import KVCacheGroup, Policy
from ubatch_guard.trace.reader import TraceReader
from ubatch_guard.vllm import parallel_config

BLOCK = 16
MODEL = DecoderModel(ModelConfig(num_hidden_layers=1))


class Backend:
    """An attention backend that does not say how its metadata is built."""


def make_runner(
    policy: Policy | None = Policy.REORDER, threshold: int | None = None, **settings
) -> GuardedRunner:
    config = EngineConfig(
        model_config=MODEL.config,
        cache_config=CacheConfig(block_size=BLOCK, num_blocks=256),
        parallel_config=ParallelConfig(num_ubatches=2),
        reorder_batch_threshold=threshold,
    )
    runner = GuardedRunner(config, MODEL)
    runner.ubatch_guard_settings = Settings(policy=policy, log_interval=0.0, **settings)
    return runner


def new(name: str, blocks: list[int], computed: int, tokens: int) -> tuple[NewRequestData, int]:
    length = computed + tokens
    assert -(-length // BLOCK) <= len(blocks)
    return NewRequestData(name, [1] * length, SamplingParams(), (blocks,), computed), tokens


def step(
    *arriving: tuple[NewRequestData, int],
    running: dict[str, tuple[int, int, list[int] | None]] | None = None,
    **changes,
) -> SchedulerOutput:
    """A step of new requests, and of running ones by ``computed, tokens, new blocks``."""
    running = running or {}
    counts = {request.req_id: tokens for request, tokens in arriving}
    counts |= {name: tokens for name, (_, tokens, _) in running.items()}
    return SchedulerOutput(
        scheduled_new_reqs=[request for request, _ in arriving],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(running),
            resumed_req_ids=changes.pop("resumed", set()),
            new_block_ids=[None if blocks is None else (blocks,) for _, _, blocks in running.values()],
            num_computed_tokens=[computed for computed, _, _ in running.values()],
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        **changes,
    )


def vote(runner: GuardedRunner, scheduled: SchedulerOutput) -> tuple[list[str], bool]:
    """Run the runner's own bookkeeping; the batch order it ends in, and its vote."""
    runner._update_states(scheduled)
    order = list(runner.input_batch.req_ids)
    counts = np.array([scheduled.num_scheduled_tokens[name] for name in order], dtype=np.int32)
    return order, runner._allow_microbatching(len(order), counts)


# A reader with a hit on four blocks that the writer computes in the same step, in front of it.
READER = new("reader", [1, 2, 3, 4, 9], computed=64, tokens=8)
WRITER = new("writer", [1, 2, 3, 4, 5], computed=0, tokens=72)


def test_a_reader_in_front_of_its_writer() -> None:
    assert vote(make_runner(), step(READER, WRITER)) == (["writer", "reader"], True)
    assert vote(make_runner(Policy.VETO), step(READER, WRITER)) == (["reader", "writer"], False)
    assert vote(make_runner(Policy.OBSERVE), step(READER, WRITER)) == (["reader", "writer"], True)
    # The control: without a guard the same step is cut as it is.
    assert vote(make_runner(None), step(READER, WRITER)) == (["reader", "writer"], True)


def test_a_writer_in_front_of_its_reader_is_left_alone() -> None:
    for policy in (Policy.REORDER, Policy.VETO):
        runner = make_runner(policy)
        assert vote(runner, step(WRITER, READER)) == (["writer", "reader"], True)
        assert runner.ubatch_guard.counters.reordered == 0
        assert not runner.ubatch_guard.counters.unsafe


def test_what_is_put_around_a_base_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are on the subclass before others come and go around vLLM's own methods."""
    seen = []
    upstream = Runner._update_states

    def update_states(self: Runner, scheduler_output: SchedulerOutput) -> None:
        seen.append(scheduler_output)
        upstream(self, scheduler_output)

    monkeypatch.setattr(Runner, "_update_states", update_states)
    hazard = step(READER, WRITER)
    assert vote(make_runner(), hazard) == (["writer", "reader"], True)
    assert seen == [hazard]


def test_observing_counts_what_it_would_do() -> None:
    runner = make_runner(Policy.OBSERVE)
    vote(runner, step(READER, WRITER))
    counters = runner.ubatch_guard.counters
    assert counters.unsafe == {"long": 1}
    assert counters.verdicts == {("veto", "allow"): 1}


def test_requests_that_come_again_under_their_names() -> None:
    """The batch has the names and order it had, but the mirror has the requests in other places."""
    runner = make_runner(Policy.VETO)
    reading, writing = ([1, 2, 3, 4, 9], 64, 8), ([1, 2, 3, 4, 5], 0, 72)
    assert vote(runner, step(new("a", *reading), new("b", *writing))) == (["a", "b"], False)
    # Freed in both orders over the two rounds, so that in one of them the places are others.
    for gone in (["a", "b"], ["b", "a"]):
        for name in gone:
            vote(runner, step(new(f"after {name}", [20], 0, 8), finished_req_ids={name}))
        others = dict.fromkeys(f"after {name}" for name in gone)  # an ordered set
        vote(runner, step(new("alone", [21], 0, 8), finished_req_ids=others))
        again = step(new("a", *writing), new("b", *reading), finished_req_ids={"alone"})
        assert vote(runner, again) == (["a", "b"], True)
        slots = runner.ubatch_guard.mirror.slots(["a", "b"]).tolist()
        assert runner.ubatch_guard.rows.slots(["a", "b"]).tolist() == slots
    assert runner.ubatch_guard.counters.vetoed == {"unsafe": 1}


def test_a_failed_load_makes_a_running_request_a_reader() -> None:
    """Two requests share blocks whose KV was lost: the second relies on the first to compute them again."""
    runner = make_runner(Policy.VETO)
    first, second = new("first", [1, 2, 3, 4, 5], 0, 72), new("second", [1, 2, 3, 4, 9], 64, 8)
    assert vote(runner, step(first, second)) == (["first", "second"], True)
    # A step later both decode; then the load turns out to have failed, and only ``first`` starts over.
    assert vote(runner, step(running={"first": (72, 1, None), "second": (72, 1, None)}))[1]
    runner.input_batch.swap_states(0, 1)
    again = step(running={"second": (72, 1, None), "first": (0, 72, None)})
    assert vote(runner, again) == (["second", "first"], False)
    assert runner.ubatch_guard.counters.unsafe == {"running": 1}


def test_a_failed_load_after_steps_that_no_cut_can_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests stand is followed there too."""
    monkeypatch.setattr(parallel_config, "leaves_cutting_to_vllm", lambda runner, decides: True)
    monkeypatch.setattr(parallel_config, "own_cuts", lambda *args: None)
    runner = make_runner(Policy.VETO)
    blocks = list(range(1, 43))
    first, second = new("first", blocks, 0, 600), new("second", blocks, 176, 8)
    assert vote(runner, step(first, second)) == (["first", "second"], True)
    small = step(running={"first": (600, 1, None), "second": (184, 16, None)})
    assert vote(runner, small)[1]
    assert runner.ubatch_guard.counters.eligible == 1
    runner.input_batch.swap_states(0, 1)
    # "first" computes again what a load has lost, "second" counts on it; both are past where they began.
    again = step(running={"second": (184, 16, None), "first": (160, 500, None)})
    assert vote(runner, again) == (["second", "first"], False)


def loading(scheduled: SchedulerOutput) -> SimpleNamespace:
    """The same step of an engine that loads KV through a connector."""
    said = {field.name: getattr(scheduled, field.name) for field in fields(scheduled)}
    return SimpleNamespace(**said, kv_connector_metadata=())


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("threshold", [None, 1, 8])
def test_after_a_failed_load_the_step_is_reordered(threshold: int | None, tokens: int) -> None:
    """Also when the second is as short as a decode; a real decode stays in front of both."""
    runner = make_runner(threshold=threshold)
    vote(runner, loading(step(new("decode", [20, 21], 0, 20))))
    first, second = new("first", [1, 2, 3, 4, 5], 0, 72), new("second", [1, 2, 3, 4, 9], 64, tokens)
    assert vote(runner, loading(step(first, second, running={"decode": (20, 1, None)})))[1]
    counters = runner.ubatch_guard.counters
    reordered = counters.reordered
    # Both are scheduled as they were: no answer of theirs was taken.
    running = {"decode": (21, 1, None), "second": (64, tokens, None), "first": (0, 72, None)}
    if threshold is None:
        # The engine's own order would put the second in front.
        runner.input_batch.swap_states(1, 2)
    order, allowed = vote(runner, loading(step(running=running)))
    assert (order, allowed) == (["decode", "first", "second"], True)
    assert counters.unsafe["running"] == 1
    assert counters.reordered == reordered + 1
    # The step after that has nothing to plan.
    running = {"decode": (22, 1, None), "second": (64 + tokens, 1, None), "first": (72, 1, None)}
    assert vote(runner, loading(step(running=running)))[1]
    assert not runner.ubatch_guard.may_plan


def test_who_is_set_back_is_known_across_finishing_and_preemption() -> None:
    """A request that comes again under its name, or from a preemption, starts where it says."""
    runner = make_runner()
    vote(runner, loading(step(new("a", [1, 2], 0, 20), new("b", [3, 4], 0, 20))))
    vote(runner, loading(step(running={"a": (20, 1, None)}, preempted_req_ids={"b"})))
    assert not runner.ubatch_guard.may_plan
    vote(runner, loading(step(new("c", [9], 0, 8), finished_req_ids={"a"})))
    vote(runner, loading(step(new("a", [5, 6], 0, 20), finished_req_ids={"c"})))
    back = step(running={"a": (20, 1, None), "b": (0, 20, [7, 8])}, resumed={"b"})
    vote(runner, loading(back))
    vote(runner, loading(step(running={"a": (21, 1, None), "b": (20, 1, None)})))
    assert not runner.ubatch_guard.may_plan
    vote(runner, loading(step(running={"a": (21, 1, None), "b": (21, 1, None)})))
    assert runner.ubatch_guard.may_plan


def test_a_request_that_is_set_back_is_looked_at_until_it_has_caught_up() -> None:
    """Also in a step whose scheduler output says nothing of loads."""
    runner = make_runner()
    vote(runner, loading(step(new("a", [1, 2], 0, 20), new("b", [3, 4], 0, 20))))
    vote(runner, loading(step(running={"a": (20, 1, None), "b": (0, 16, None)})))
    guard = runner.ubatch_guard
    assert guard.rows.set_back
    silent = loading(step(running={"a": (21, 1, None), "b": (0, 16, None)}))
    silent.kv_connector_metadata = None
    runner._update_states(silent)
    assert not guard.rows.loads_kv
    assert guard.must_look()
    vote(runner, loading(step(running={"a": (22, 1, None), "b": (16, 8, None)})))
    assert not guard.rows.set_back


def test_resumed_and_preempted_rows_are_replaced() -> None:
    runner = make_runner(Policy.VETO, verify_every=1)
    assert vote(runner, step(new("a", [1, 2], 0, 32), new("b", [3, 4], 0, 32)))[1]
    assert vote(runner, step(running={"b": (32, 1, [5])}, preempted_req_ids={"a"}))[1]
    # ``a`` comes back on new blocks, in front of a writer of the block it hits.
    back = step(new("c", [7, 8], 0, 32), running={"b": (33, 1, None), "a": (16, 16, [7, 9])}, resumed={"a"})
    runner._update_states(back)
    order = runner.input_batch.req_ids
    runner.input_batch.swap_states(order.index("a"), 0)
    counts = np.array(
        [back.num_scheduled_tokens[name] for name in runner.input_batch.req_ids], dtype=np.int32
    )
    assert not runner._allow_microbatching(3, counts)
    assert runner.ubatch_guard.counters.mirror_differences == 0
    assert list(runner.ubatch_guard.mirror.row("a", 0)) == [7, 9]


def test_microbatching_switched_on_between_steps() -> None:
    """The guard follows the blocks all the time, and decides by each step's own configuration."""
    runner = make_runner()
    runner.parallel_config = ParallelConfig()
    assert vote(runner, step(new("early", [20, 21], 0, 20))) == (["early"], True)
    assert vote(runner, step(READER, WRITER, running={"early": (20, 1, None)}))[0][1:] == ["reader", "writer"]
    runner.parallel_config = ParallelConfig(num_ubatches=2)
    late = step(
        new("late reader", [30, 31], 16, 8),
        new("late writer", [30, 32], 0, 32),
        finished_req_ids={"reader", "writer"},
    )
    late.num_scheduled_tokens["early"] = 1
    late.scheduled_cached_reqs = CachedRequestData(["early"], set(), [None], [21])
    order, allowed = vote(runner, late)
    assert order.index("late writer") < order.index("late reader")
    assert allowed
    assert runner.ubatch_guard.counters.steps == 1


def test_decodes_stay_in_front() -> None:
    runner = make_runner(threshold=8)
    vote(runner, step(new("decode", [20, 21], 0, 20)))
    order, allowed = vote(runner, step(READER, WRITER, running={"decode": (20, 1, None)}))
    assert order == ["decode", "writer", "reader"]
    assert allowed


@pytest.mark.parametrize("attention", ["a backend that cannot be looked at", "context parallelism"])
def test_where_the_order_is_fixed_the_step_is_vetoed(attention: str) -> None:
    runner = make_runner()
    if attention == "a backend that cannot be looked at":
        runner.attn_groups = [[SimpleNamespace(backend=Backend)]]
    else:
        runner.parallel_config = SimpleNamespace(
            use_ubatching=True,
            num_ubatches=2,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=2,
        )
    assert vote(runner, step(READER, WRITER)) == (["reader", "writer"], False)
    assert runner.ubatch_guard.counters.vetoed == {"unsafe": 1}


def test_a_cycle_has_no_order() -> None:
    """Two requests that each read what the other writes: no scheduler makes them, and they are not cut."""
    runner = make_runner()
    a = new("a", [1, 2, 3], computed=16, tokens=32)
    b = new("b", [2, 1, 4], computed=16, tokens=32)
    assert vote(runner, step(a, b))[1] is False
    assert runner.ubatch_guard.counters.vetoed == {"no_order": 1}


def test_a_request_that_came_before_the_guard() -> None:
    """No step is lost: the mirror is made from the runner's own requests."""
    runner = make_runner(None)
    vote(runner, step(new("a", [1, 2], 0, 32), new("b", [3, 4], 0, 32)))
    runner.ubatch_guard_settings = Settings(policy=Policy.REORDER, log_interval=0.0)
    decodes = {"a": (32, 1, [5]), "b": (32, 1, [6])}
    assert vote(runner, step(running=decodes))[1]
    assert vote(runner, step(READER, WRITER, running={"a": (33, 1, None), "b": (33, 1, None)}))[1]
    assert runner.ubatch_guard.counters.reordered == 1
    assert list(runner.ubatch_guard.mirror.row("a", 0)) == [1, 2, 5]
    assert not runner.ubatch_guard.counters.vetoed


def test_a_difference_from_the_block_table(caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(verify_every=2)
    vote(runner, step(new("a", [1, 2], 0, 20), new("b", [3, 4], 0, 20)))
    # Someone changes the engine's table behind the guard's back.
    runner.input_batch.block_table.block_tables[0].get_numpy_array()[1, 0] = 77
    runner.requests["b"].block_ids[0][0] = 77
    decodes = step(running={"a": (20, 1, None), "b": (20, 1, None)})
    assert vote(runner, decodes)[1], "not the step to verify in"
    assert not vote(runner, step(running={"a": (21, 1, None), "b": (21, 1, None)}))[1]
    counters = runner.ubatch_guard.counters
    assert counters.mirror_differences == 1
    assert counters.vetoed == {"mirror_difference": 1}
    assert "'b', group 0, column 0" in caplog.text
    assert list(runner.ubatch_guard.mirror.row("b", 0)) == [77, 4]
    for computed in (22, 23):
        assert vote(runner, step(running={"a": (computed, 1, None), "b": (computed, 1, None)}))[1]
    assert counters.mirror_differences == 1


def test_a_group_of_a_kind_that_is_not_known_counts_as_read_as_a_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class StrangeSpec:
        block_size = BLOCK

    runner = make_runner()
    config = runner.kv_cache_config
    runner.kv_cache_config = replace(
        config, kv_cache_groups=(replace(config.kv_cache_groups[0], kv_cache_spec=StrangeSpec()),)
    )
    assert vote(runner, step(READER, WRITER)) == (["writer", "reader"], True)
    assert vote(runner, step(running={"writer": (72, 1, None), "reader": (72, 1, None)}))[1]
    assert not runner.ubatch_guard.counters.vetoed
    assert caplog.text.count("StrangeSpec") == 1, "logged once"


@pytest.mark.parametrize("block_size", [0, 16.5, None])
def test_groups_that_cannot_be_read(block_size: object, caplog: pytest.LogCaptureFixture) -> None:
    """Steps that admit a request run whole; in the others nobody reads what they write."""

    class BrokenSpec:
        pass

    BrokenSpec.block_size = block_size
    runner = make_runner()
    config = runner.kv_cache_config
    runner.kv_cache_config = replace(
        config, kv_cache_groups=(replace(config.kv_cache_groups[0], kv_cache_spec=BrokenSpec()),)
    )
    assert vote(runner, step(READER, WRITER)) == (["reader", "writer"], False)
    assert vote(runner, step(running={"writer": (72, 1, None), "reader": (72, 1, None)}))[1]
    assert runner.ubatch_guard.counters.vetoed == {"unknown_group": 1}
    assert caplog.text.count("not understood") == 1, "logged once"


def test_an_array_that_cannot_be_read_is_a_no() -> None:
    runner = make_runner(Policy.VETO)
    runner._update_states(step(READER, WRITER))
    assert runner._allow_microbatching(2, np.array([8.5, 72.0])) is False
    (reason,) = runner.ubatch_guard.counters.vetoed
    assert reason == "dtype"


def test_a_trace_that_cannot_be_written_costs_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner(trace=str(tmp_path / "no folder" / "steps.jsonl"))
    assert vote(runner, step(READER, WRITER)) == (["writer", "reader"], True)
    assert "no trace is written" in caplog.text


def test_the_trace_has_the_step(tmp_path: Path) -> None:
    runner = make_runner(trace=str(tmp_path / "steps.{rank}.jsonl"))
    vote(runner, step(READER, WRITER))
    vote(runner, step(running={"writer": (72, 1, None)}, finished_req_ids={"reader", "never seen"}))
    guard = runner_guard(runner)
    guard.recorder.close()
    assert guard.recorder.path.name.startswith("steps.")
    assert guard.recorder.path.name.endswith(".0.jsonl")
    with TraceReader(guard.recorder.path) as trace:
        first, second = trace
    assert tuple(first.request_ids) == ("writer", "reader")
    assert first.vllm_allows
    assert tuple(second.changes.finished) == ("reader",)
    assert json.loads(guard.recorder.path.read_text().splitlines()[0])["block_sizes"] == [BLOCK]


def test_counts_reach_the_log_and_prometheus(caplog: pytest.LogCaptureFixture) -> None:
    def sample() -> float:
        return prometheus_client.REGISTRY.get_sample_value("ubatch_guard_reordered_steps_total") or 0.0

    runner = make_runner()
    runner.ubatch_guard_settings = replace(runner.ubatch_guard_settings, log_interval=1e-9)
    before = sample()
    with caplog.at_level("INFO", logger="vllm.ubatch_guard"):
        vote(runner, step(READER, WRITER))
    assert "ubatch-guard (reorder): 1 steps" in caplog.text
    assert "1 reordered (2 requests moved)" in caplog.text
    assert sample() == before + 1


def test_v2_follows_where_requests_stand_in_steps_that_no_cut_can_come_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As above: both fall back to where they began the small step, past where the large one saw them."""
    monkeypatch.setattr(parallel_config, "leaves_cutting_to_vllm", lambda runner, decides: True)
    runner = shapes.guarded(
        "v2", Settings(policy=Policy.REORDER, log_interval=0.0), (KVCacheGroup(BLOCK, 256),)
    )
    runner.parallel_config.dbo_decode_token_threshold, runner.parallel_config.dbo_prefill_token_threshold = (
        32,
        512,
    )
    blocks, prompt = ([*range(1, 51)],), range(800)

    def loading_step(counts: dict[str, int], computed: dict[str, int], new: bool = False) -> SchedulerOutput:
        arriving = [shapes.NewRequestData(r, blocks, computed[r], prompt) for r in counts] if new else []
        running = [] if new else list(counts)
        cached = shapes.CachedRequestData(running, [None] * len(running), [computed[r] for r in running])
        scheduled = shapes.SchedulerOutput(arriving, cached, counts)
        scheduled.kv_connector_metadata = ()
        return scheduled

    assert runner.run(loading_step({"first": 600, "second": 8}, {"first": 0, "second": 176}, True)).allowed
    assert runner.run(loading_step({"first": 8, "second": 16}, {"first": 600, "second": 184})).allowed
    again = loading_step({"second": 16, "first": 500}, {"second": 184, "first": 160})
    assert not runner.run(again).allowed
    assert runner.ubatch_guard.counters.vetoed == {"set_back": 1}
