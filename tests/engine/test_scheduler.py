"""Who runs in a step: continuous batching, chunked prefill, preemption; and the batch the runner keeps."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from ubatch_guard.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from ubatch_guard.engine.input_batch import MultiGroupBlockTable
from ubatch_guard.engine.kv_cache import KVCacheConfig, KVCacheManager
from ubatch_guard.engine.llm_engine import LLMEngine, load_model
from ubatch_guard.engine.outputs import ModelRunnerOutput, SchedulerOutput
from ubatch_guard.engine.request import Request, SamplingParams
from ubatch_guard.engine.runner import Runner
from ubatch_guard.engine.scheduler import Scheduler

from .random_workloads import TINY, random_workload

BLOCK = 4


def scheduler(num_blocks: int = 64, **limits: int) -> Scheduler:
    config = KVCacheConfig.of(ModelConfig(), CacheConfig(BLOCK, num_blocks))
    return Scheduler(SchedulerConfig(**limits), KVCacheManager(config))


def request(name: str, length: int, max_tokens: int = 4) -> Request:
    tokens = random.Random(name).choices(range(1000), k=length)
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), BLOCK)


def answer(asked: Scheduler, output: SchedulerOutput) -> list[str]:
    """Sample token 0 for every request whose prompt is through; returns who finished."""
    sampled = []
    for req_id in output.num_scheduled_tokens:
        of = asked._requests[req_id]
        sampled.append([0] if of.num_computed_tokens == of.num_tokens else [])
    done = asked.update_from_output(ModelRunnerOutput(list(output.num_scheduled_tokens), sampled))
    return [finished.req_id for finished in done]


def test_a_long_prompt_runs_in_chunks_beside_the_decodes() -> None:
    asked = scheduler(max_num_batched_tokens=10)
    asked.add_request(request("a", 4))
    asked.add_request(request("b", 17))
    scheduled = []
    for _ in range(4):
        output = asked.schedule()
        scheduled.append(output.num_scheduled_tokens)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values()) <= 10
        answer(asked, output)
    assert scheduled == [{"a": 4, "b": 6}, {"a": 1, "b": 9}, {"a": 1, "b": 2}, {"a": 1, "b": 1}]


def test_no_more_requests_than_places() -> None:
    asked = scheduler(max_num_seqs=2)
    for name in "abc":
        asked.add_request(request(name, 3, max_tokens=1 if name == "a" else 3))
    output = asked.schedule()
    assert list(output.num_scheduled_tokens) == ["a", "b"]
    assert answer(asked, output) == ["a"]
    output = asked.schedule()
    assert output.finished_req_ids == {"a"}
    assert list(output.num_scheduled_tokens) == ["b", "c"]
    assert [new.req_id for new in output.scheduled_new_reqs] == ["c"]


def test_the_last_to_come_is_preempted_and_comes_back() -> None:
    asked = scheduler(num_blocks=6)  # 5 to hand out
    asked.add_request(request("a", 8, max_tokens=6))
    asked.add_request(request("b", 7, max_tokens=6))
    answer(asked, asked.schedule())  # a: 2 blocks, b: 2
    output = asked.schedule()  # a takes the last block
    assert not output.preempted_req_ids
    answer(asked, output)
    output = asked.schedule()  # b would need a third
    assert output.preempted_req_ids == {"b"}
    assert list(output.num_scheduled_tokens) == ["a"]
    for _ in range(10):
        answer(asked, output)
        output = asked.schedule()
        if output.scheduled_cached_reqs.resumed_req_ids:
            break
    assert output.scheduled_cached_reqs.resumed_req_ids == {"b"}
    index = output.scheduled_cached_reqs.req_ids.index("b")
    blocks = output.scheduled_cached_reqs.new_block_ids[index]
    assert blocks is not None
    computed = output.scheduled_cached_reqs.num_computed_tokens[index]
    assert len(blocks[0]) * BLOCK >= computed + output.num_scheduled_tokens["b"]
    assert computed + output.num_scheduled_tokens["b"] == asked._requests["b"].num_tokens


def test_a_cache_that_is_too_small_is_an_error() -> None:
    asked = scheduler(num_blocks=3)
    asked.add_request(request("a", 30))
    with pytest.raises(RuntimeError, match="too small"):
        asked.schedule()


def test_an_id_cannot_be_under_way_twice() -> None:
    asked = scheduler()
    asked.add_request(request("a", 3))
    with pytest.raises(ValueError, match="under way"):
        asked.add_request(request("a", 5))


def test_a_request_must_fit_the_model() -> None:
    config = EngineConfig(model_config=TINY, scheduler_config=SchedulerConfig(max_model_len=20))
    engine = LLMEngine(config, Runner(config, load_model(config)))
    with pytest.raises(ValueError, match="max_model_len"):
        engine.add_request("a", [1] * 18, SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match="empty"):
        engine.add_request("b", [], SamplingParams(max_tokens=3))


class CheckedRunner(Runner):
    """Compares its persistent batch with the scheduler's own books in every step."""

    engine: LLMEngine
    num_preemptions = 0

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        self.num_preemptions += len(scheduler_output.preempted_req_ids)
        super()._may_reorder_batch(scheduler_output)
        batch = self.input_batch
        assert sorted(batch.req_ids) == sorted(scheduler_output.num_scheduled_tokens)
        manager = self.engine.scheduler.kv_cache_manager
        for row, req_id in enumerate(batch.req_ids):
            assert batch.req_id_to_index[req_id] == row
            known = self.engine.scheduler._requests[req_id]
            assert self.requests[req_id].token_ids == known.token_ids
            computed = known.num_computed_tokens - scheduler_output.num_scheduled_tokens[req_id]
            assert batch.num_computed_tokens_cpu[row] == computed
            for group, table in enumerate(batch.block_table.block_tables):
                held = manager._rows[req_id][group]
                assert table.num_blocks_per_row[row] == len(held)
                got = table.get_numpy_array()[row, : len(held)]
                # A window group's row keeps ids of blocks that were given back.
                visible = np.array(held) != 0
                assert (got[visible] == np.array(held)[visible]).all()
        threshold = self.reorder_batch_threshold
        if threshold is not None:
            lengths = [scheduler_output.num_scheduled_tokens[req_id] for req_id in batch.req_ids]
            phases = [
                0 if length <= threshold else 1 if batch.num_computed_tokens_cpu[row] else 2
                for row, length in enumerate(lengths)
            ]
            assert phases == sorted(phases)


def test_the_persistent_batch_follows_the_scheduler() -> None:
    num_preemptions = 0
    for seed in range(100):
        config, requests = random_workload(seed)
        config = replace(config, parallel_config=ParallelConfig(), sanitize=False)
        runner = CheckedRunner(config, load_model(config))
        runner.engine = LLMEngine(config, runner)
        outputs = runner.engine.serve(requests)
        num_preemptions += runner.num_preemptions
        assert sorted(outputs) == sorted(request.req_id for request in requests)
        for asked in requests:
            assert len(outputs[asked.req_id]) == asked.sampling_params.max_tokens
    assert num_preemptions >= 10


def test_rows_that_swap_without_their_blocks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison above."""
    monkeypatch.setattr(MultiGroupBlockTable, "swap_row", lambda *_: None)
    with pytest.raises(AssertionError):
        test_the_persistent_batch_follows_the_scheduler()


def test_neither_batching_nor_caching_changes_an_answer() -> None:
    for seed in range(25):
        config, requests = random_workload(seed)
        config = replace(config, parallel_config=ParallelConfig(), sanitize=False)
        model = load_model(config)
        together = LLMEngine(config, Runner(config, model)).serve(requests)
        alone = {}
        for asked in requests:
            plain = replace(
                config,
                cache_config=CacheConfig(4, 64, enable_prefix_caching=False),
                scheduler_config=SchedulerConfig(max_model_len=64),
            )
            alone |= LLMEngine(plain, Runner(plain, model)).serve([asked])
        assert together == alone, seed


def test_a_stop_token_ends_a_request() -> None:
    config = EngineConfig(model_config=TINY)
    model = load_model(config)
    free = LLMEngine(config, Runner(config, model))
    free.add_request("a", [1, 2, 3], SamplingParams(max_tokens=12))
    tokens = free.run()["a"]
    stop = tokens[4]
    stopped = LLMEngine(config, Runner(config, model))
    stopped.add_request("a", [1, 2, 3], SamplingParams(max_tokens=12, stop_token_id=stop))
    assert stopped.run()["a"] == tokens[: tokens.index(stop) + 1]
