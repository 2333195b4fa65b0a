"""Model Runner V1 with drafts, so decodes of several tokens: by n-grams, by EAGLE, and scheduled ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import runners

runners.use("v1")

import workloads
from async_scheduling import allow_async_scheduling
from cases import measure, preemptions, scheduler_outputs
from cpu_engine import Engine
from outcomes import Recorder
from tiny_models import save_eagle_head, save_tiny_model

DRAFTS = 3
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
# The n-grams last: vLLM's search for Triton kernels at the start of an engine trips over what numba leaves.
DRAFTERS = ["EAGLE", "async EAGLE", "n-gram"]


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(drafter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("models")
    if drafter == "n-gram":
        method = NGRAM
    else:
        method = {"method": "eagle", "model": str(save_eagle_head(folder / "eagle"))}
    is_async = drafter.startswith("async")
    if is_async:
        allow_async_scheduling()
    engine = Engine(
        save_tiny_model(folder / "llama"),
        min_tokens=8,
        max_model_len=1024,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=40,
        max_num_seqs=32,
        async_scheduling=is_async,
        speculative_config={"num_speculative_tokens": DRAFTS, **method},
    )
    # The scheduler counts with tokens that are not sampled yet, and drafts that are not refused yet.
    assert engine.runner.use_async_spec_decode is is_async
    yield engine
    engine.close()


# vLLM's backends raise their threshold to 1 + drafts.
@pytest.mark.parametrize("threshold", [1 + DRAFTS, 128])
def test_drafts(engine: Engine, drafter: str, threshold: int, record_outcome: Recorder) -> None:
    with scheduler_outputs(engine) as scheduled:
        outcome, _ = measure(
            engine, workloads.repetitive().called(f"{drafter} drafts"), record_outcome, threshold=threshold
        )
    assert any(step.scheduled_spec_decode_tokens for step in scheduled)
    assert outcome.reorder_split == outcome.eligible > 0
    assert outcome.unguarded_wrong > 0


def test_chunked_prefill(engine: Engine, drafter: str, record_outcome: Recorder) -> None:
    workload = workloads.chunked_prefill().called(f"{drafter} drafts")
    outcome, counters = measure(engine, workload, record_outcome, threshold=128)
    assert outcome.reorder_split == outcome.eligible > 0
    assert outcome.unguarded_wrong > 0
    assert counters.reordered > 0


def test_preemption(engine: Engine, drafter: str, record_outcome: Recorder) -> None:
    workload = workloads.preemption(requests=12, max_tokens=36).called(f"{drafter} drafts")
    with preemptions(engine) as preempted:
        outcome, counters = measure(engine, workload, record_outcome, threshold=1 + DRAFTS)
    assert preempted
    assert outcome.reorder_split == outcome.eligible > 0
    assert outcome.unguarded_wrong > 0
    assert counters.reordered > 0
