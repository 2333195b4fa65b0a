"""Model Runner V1 after failed KV loads: running requests rely on others to compute lost blocks again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import runners

runners.use("v1")

import workloads
from cases import measure
from cpu_engine import Engine
from outcomes import Recorder
from tiny_models import save_tiny_model
from workloads import Workload


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from vllm.config import KVTransferConfig

    engine = Engine(
        save_tiny_model(tmp_path_factory.mktemp("llama")),
        kv_transfer_config=KVTransferConfig(
            kv_connector="FailingConnector",
            kv_connector_module_path="failing_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        ),
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("threshold", [1, 128])
@pytest.mark.parametrize(
    "case",
    [lambda: workloads.few_shot("20-60"), lambda: workloads.grpo(groups=4, size=4)],
    ids=["few_shot", "grpo"],
)
def test_failed_load(
    engine: Engine, case: Callable[[], Workload], threshold: int, record_outcome: Recorder
) -> None:
    outcome, counters = measure(engine, case().called("failed load"), record_outcome, threshold=threshold)
    # The first step and, after the load has failed, the same once more.
    assert outcome.reorder_split == outcome.eligible == 2
    assert outcome.unguarded_wrong > 0
    # No new request reads what another writes: the first step has its prefix from the connector.
    assert counters.unsafe == {"running": 1}
    assert counters.reordered == 1
