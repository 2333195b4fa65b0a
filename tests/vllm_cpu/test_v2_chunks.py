"""Model Runner V2 with a small token budget: prompts are computed in chunks, cut off anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import runners

runners.use("v2")

import workloads
from cases import measure
from cpu_engine import Engine
from outcomes import Recorder
from tiny_models import save_tiny_model
from workloads import Workload

CASES: dict[str, Callable[[], Workload]] = {
    "few_shot": lambda: workloads.few_shot("20-300"),
    "few_shot_writer_last": lambda: workloads.few_shot_writer_last("20-60"),
    "grpo": lambda: workloads.grpo(groups=4, size=6),
    "rag": lambda: workloads.rag(requests=18),
    "chunked_prefill": workloads.chunked_prefill,
}


@pytest.fixture(scope="module")
def tokens(request: pytest.FixtureRequest) -> int:
    """``max_num_batched_tokens``, given by the tests."""
    return request.param


@pytest.fixture(scope="module")
def engine(tokens: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        save_tiny_model(tmp_path_factory.mktemp("llama")), min_tokens=8, max_num_batched_tokens=tokens
    )
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("tokens", "case", "num_ubatches"),
    [
        (300, "few_shot", 2),
        (300, "few_shot_writer_last", 2),
        (300, "grpo", 2),
        (300, "rag", 2),
        (300, "chunked_prefill", 3),
        (512, "few_shot", 2),
        (512, "grpo", 2),
    ],
    indirect=["tokens"],
)
def test_chunks(engine: Engine, tokens: int, case: str, num_ubatches: int, record_outcome: Recorder) -> None:
    workload = CASES[case]().called(f"chunks of {tokens}")
    if num_ubatches > 2:
        workload.called(f"{num_ubatches} microbatches")
    outcome, _ = measure(engine, workload, record_outcome, num_ubatches=num_ubatches)
    assert outcome.unguarded_wrong > 0
    assert outcome.reorder_split == outcome.eligible > 0
