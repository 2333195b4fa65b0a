"""Model Runner V2 with drafts: by EAGLE, and by n-grams with windowed and full attention layers in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import runners

runners.use("v2")

import workloads
from cases import group_values, measure
from cpu_engine import Engine
from outcomes import Recorder
from tiny_models import save_eagle_head, save_tiny_model
from workloads import Workload

SLIDING_WINDOW = 128


@pytest.fixture(scope="module")
def drafter(request: pytest.FixtureRequest) -> str:
    """Given by the tests."""
    return request.param


@pytest.fixture(scope="module")
def engine(drafter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("models")
    if drafter == "EAGLE":
        model = save_tiny_model(folder / "llama")
        method = {"method": "eagle", "model": str(save_eagle_head(folder / "eagle"))}
    else:
        model = save_tiny_model(folder / "gemma", sliding_window=SLIDING_WINDOW)
        method = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    engine = Engine(
        model,
        min_tokens=8,
        max_num_batched_tokens=1024,
        speculative_config={"num_speculative_tokens": 3, **method},
    )
    assert engine.v2
    yield engine
    engine.close()


@pytest.mark.parametrize("drafter", ["EAGLE"], indirect=True)
def test_eagle(engine: Engine, drafter: str, record_outcome: Recorder) -> None:
    workload = workloads.few_shot("20-60", requests=5).called(f"{drafter} drafts")
    outcome, counters = measure(engine, workload, record_outcome)
    assert outcome.unguarded_wrong > 0
    assert counters.reordered > 0
    assert outcome.reorder_split == outcome.eligible > 0


@pytest.mark.parametrize("drafter", ["n-gram"], indirect=True)
@pytest.mark.parametrize(
    "case",
    [
        lambda: workloads.few_shot("20-60"),
        lambda: workloads.few_shot_writer_last("20-60"),
        lambda: workloads.repetitive(requests=5),
    ],
    ids=["few_shot", "few_shot_writer_last", "repetitive"],
)
def test_groups_and_drafts(
    engine: Engine, drafter: str, case: Callable[[], Workload], record_outcome: Recorder
) -> None:
    workload = case().called(f"sliding window, {drafter} drafts")
    outcome, counters = measure(engine, workload, record_outcome)
    assert group_values(engine, "sliding_window") == {None, SLIDING_WINDOW}
    assert outcome.unguarded_wrong > 0
    assert counters.reordered > 0
    assert outcome.reorder_split == outcome.eligible > 0
