"""Model Runner V2, cut in other ways: into three microbatches, and down to steps of two tokens."""

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
    "few_shot 20-60": lambda: workloads.few_shot("20-60"),
    "few_shot 20-300": lambda: workloads.few_shot("20-300"),
    "grpo": lambda: workloads.grpo(groups=4, size=6),
    "rag": lambda: workloads.rag(requests=18),
    "multi_turn": workloads.multi_turn,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(save_tiny_model(tmp_path_factory.mktemp("llama")))
    yield engine
    engine.close()


@pytest.mark.parametrize("case", ["few_shot 20-60", "few_shot 20-300", "grpo", "rag"])
def test_three_microbatches(engine: Engine, case: str, record_outcome: Recorder) -> None:
    workload = CASES[case]().called("3 microbatches")
    outcome, counters = measure(engine, workload, record_outcome, num_ubatches=3)
    assert outcome.unguarded_wrong > 0
    assert outcome.reorder_split == outcome.eligible > 0
    assert counters.reordered > 0


@pytest.mark.parametrize(
    ("case", "num_ubatches"), [("few_shot 20-60", 2), ("grpo", 2), ("multi_turn", 2), ("rag", 3)]
)
def test_decodes_are_cut(engine: Engine, case: str, num_ubatches: int, record_outcome: Recorder) -> None:
    workload = CASES[case]().called("decodes cut")
    if num_ubatches > 2:
        workload.called(f"{num_ubatches} microbatches")
    outcome, counters = measure(engine, workload, record_outcome, num_ubatches=num_ubatches, min_tokens=2)
    assert outcome.unguarded_wrong > 0
    # Every step but those of one request, or with fewer tokens than microbatches.
    assert outcome.reorder_split == outcome.eligible > counters.reordered > 0
