"""vLLM's own guard, taken out of the installed vLLM by itself, so that it runs without the engine's imports.

Run as a program under callgrind, this asks vLLM's function and the baseline of the benchmarks about the cases
named, once to warm up and once to count; callgrind writes its count away whenever ``Mirror.nbytes`` is read.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ubatch_guard import reference
from ubatch_guard.bench import Subjects
from ubatch_guard.cases import DECODE_THRESHOLD, by_name
from ubatch_guard.step import Step


@functools.cache
def _vllms_rule() -> Callable[..., bool]:
    """``GPUModelRunner._allow_microbatching``, compiled from the installed source.

    Importing the module takes the whole of torch, which is minutes under valgrind.
    """
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("v1") / "worker" / "gpu_model_runner.py"
    function = next(
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "_allow_microbatching"
    )
    names: dict[str, Any] = {"np": np}
    exec(compile(ast.Module([function], []), str(source), "exec"), names)
    rule: Callable[..., bool] = names[function.name]
    return rule


def bind(step: Step) -> Callable[[], bool]:
    """vLLM's function over the arrays of a step."""
    rule = _vllms_rule()
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
    return lambda: rule(runner, step.num_reqs, scheduled)


def _program(names: Sequence[str]) -> None:
    mirror = Subjects(by_name(names[0]).step()).mirror
    for name in names:
        step = by_name(name).step()
        for call in (bind(step), lambda step=step: reference.vllm_allows(step, DECODE_THRESHOLD)):
            for _ in ("warm up", "count"):
                allowed = call()
                _ = mirror.nbytes
                assert allowed is True


if __name__ == "__main__":
    _program(sys.argv[1:])
