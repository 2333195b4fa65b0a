"""The sanitizer sees what is read too early, all of it and nothing else."""

from __future__ import annotations

import torch

from ubatch_guard.engine.config import EngineConfig, ParallelConfig
from ubatch_guard.engine.guarded import make_runner
from ubatch_guard.engine.llm_engine import LLMEngine, load_model
from ubatch_guard.engine.runner import Runner
from ubatch_guard.engine.sanitizer import Sanitizer, UnwrittenRead
from ubatch_guard.engine.workloads import fewshot


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_a_slot_counts_from_the_start_of_the_step_to_its_write() -> None:
    sanitizer = Sanitizer(num_layers=2, num_slots=16, block_size=4, device=torch.device("cpu"))
    sanitizer.on_read(0, "before", 0, slots(4, 5))
    sanitizer.begin_step([slots(4, 5, 6), slots(4, 5, 6)])
    sanitizer.on_read(0, "early", 8, slots(3, 4, 5))
    sanitizer.on_write(0, slots(4, 5))
    sanitizer.on_read(0, "in time", 8, slots(3, 4, 5))
    sanitizer.on_read(0, "half", 0, slots(5, 6))
    sanitizer.on_read(1, "other layer", 0, slots(4))
    assert sanitizer.end_step() == [
        UnwrittenRead("early", 0, 1, 9),
        UnwrittenRead("early", 0, 1, 10),
        UnwrittenRead("half", 0, 1, 1),
        UnwrittenRead("other layer", 1, 1, 0),
    ]
    assert sanitizer.end_step() == []
    sanitizer.begin_step([slots(), slots()])
    sanitizer.on_read(0, "next step", 0, slots(4, 5, 6))
    assert sanitizer.end_step() == []


def first_step(rule: str, num_ubatches: int) -> tuple[Runner, EngineConfig]:
    workload = fewshot(512, seed=0)
    config = EngineConfig(
        cache_config=workload.cache_config,
        scheduler_config=workload.scheduler_config,
        parallel_config=ParallelConfig(num_ubatches=num_ubatches),
        sanitize=True,
    )
    runner = make_runner(rule, config, load_model(config))
    engine = LLMEngine(config, runner)
    for request in workload.requests:
        engine.add_request(request.req_id, request.prompt_token_ids, request.sampling_params)
    engine.step()
    return runner, config


def test_the_story_of_the_few_shot_burst() -> None:
    """One writer of a 672-token preamble, behind its readers: each reads 42 blocks, and none is written."""
    runner, config = first_step("unguarded", num_ubatches=2)
    (cut,) = runner.last_step.cuts
    batch, reads = runner.input_batch, runner.last_step.unwritten_reads
    computed = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
    assert computed == [672] * (batch.num_reqs - 1) + [0]
    readers = {read.req_id for read in reads}
    assert len(readers) > 10
    for reader in readers:
        for layer in range(config.model_config.num_hidden_layers):
            own = [read for read in reads if (read.req_id, read.layer) == (reader, layer)]
            assert sorted(read.position for read in own) == list(range(672))
            assert len({read.block for read in own}) == 42
    # Those in the later microbatch, where the writer is, read what is written by then.
    assert batch.req_ids[-2] not in readers
    assert 0 < cut < runner.last_step.num_tokens


def test_nothing_is_reported_when_the_step_is_whole_or_reordered() -> None:
    for rule, num_ubatches in (("unguarded", 1), ("reorder", 2), ("reorder", 3), ("veto", 2)):
        runner, _ = first_step(rule, num_ubatches)
        assert runner.last_step.unwritten_reads == ()
        assert bool(runner.last_step.cuts) == (rule == "reorder")
