"""Model Runner V1 with little room: chunked prefill, preemption, writers in the last slot; the trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import runners

runners.use("v1")

import workloads
from cases import measure, preemptions
from cpu_engine import Engine
from outcomes import Recorder
from tiny_models import save_tiny_model

from ubatch_guard.step import Policy
from ubatch_guard.trace.audit import AuditOptions, audit_trace

MIN_TOKENS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        save_tiny_model(tmp_path_factory.mktemp("llama")),
        min_tokens=MIN_TOKENS,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=72,
        max_num_seqs=32,
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("threshold", [None, 128])
@pytest.mark.parametrize("suffix", workloads.SUFFIXES)
def test_writer_in_the_last_slot(
    engine: Engine, suffix: str, threshold: int | None, record_outcome: Recorder
) -> None:
    workload = workloads.few_shot_writer_last(suffix)
    outcome, counters = measure(engine, workload, record_outcome, threshold=threshold)
    assert outcome.reorder_split == outcome.eligible > 0
    # The hazard needs no backend that reorders.
    assert outcome.unguarded_wrong > 0
    assert counters.reordered > 0


@pytest.mark.parametrize("threshold", [1, 128])
def test_chunked_prefill(engine: Engine, threshold: int | None, record_outcome: Recorder) -> None:
    outcome, _ = measure(engine, workloads.chunked_prefill(), record_outcome, threshold=threshold)
    assert outcome.unguarded_wrong > 0
    assert outcome.reorder_split == outcome.eligible > 0


def test_preemption(engine: Engine, record_outcome: Recorder) -> None:
    with preemptions(engine) as preempted:
        outcome, _ = measure(engine, workloads.preemption(), record_outcome, threshold=128)
    assert preempted
    assert outcome.unguarded_wrong > 0
    assert outcome.reorder_split == outcome.eligible > 0


def test_the_trace_counts_as_the_counters_do(engine: Engine, tmp_path: Path) -> None:
    """What the recorder wrote of a run, audited, is what the guard counted in it."""
    engine.set(dbo=True, threshold=128, policy=Policy.VETO, trace=str(tmp_path / "steps.{rank}.jsonl"))
    for workload in (
        workloads.preemption(),
        workloads.chunked_prefill(),
        workloads.few_shot_writer_last("1"),
    ):
        engine.run(workload)
    guard = engine.guard
    guard.recorder.close()
    (path,) = tmp_path.glob("steps.*.0.jsonl")
    assert path == guard.recorder.path
    audit = audit_trace(
        path,
        AuditOptions(
            policy=Policy.VETO, prefill_token_threshold=MIN_TOKENS, decode_token_threshold=MIN_TOKENS
        ),
    )
    counters = guard.counters
    assert guard.recorder.dropped == 0
    assert audit.steps == counters.steps
    assert audit.eligible == counters.eligible > 0
    assert audit.kept == counters.eligible_allowed
    assert audit.hazardous_any_cut == audit.vetoed == counters.eligible - counters.eligible_allowed > 0
    vllm_vetoes = sum(count for (_, theirs), count in counters.verdicts.items() if theirs == "veto")
    assert audit.engine_vetoed == vllm_vetoes
