"""Model Runner V2 with little room: chunked prefill, preemption (a request comes back as a new one)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import runners

runners.use("v2")

import workloads
from cases import measure, preemptions
from cpu_engine import Engine
from outcomes import Recorder
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        save_tiny_model(tmp_path_factory.mktemp("llama")),
        min_tokens=4,
        max_model_len=512,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=24,
        max_num_seqs=32,
    )
    assert engine.v2
    yield engine
    engine.close()


def test_chunked_prefill(engine: Engine, record_outcome: Recorder) -> None:
    outcome, _ = measure(engine, workloads.chunked_prefill(), record_outcome)
    assert outcome.reorder_split == outcome.eligible > 0
    assert outcome.unguarded_wrong > 0


def test_preemption(engine: Engine, record_outcome: Recorder) -> None:
    with preemptions(engine) as preempted:
        outcome, _ = measure(engine, workloads.preemption(requests=7, max_tokens=40), record_outcome)
    assert preempted
    assert outcome.reorder_split == outcome.eligible > 0
