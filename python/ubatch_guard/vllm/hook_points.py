"""Which hook points a vLLM has, read from its sources: no import, no version number.

V1, ``vllm/v1/worker/gpu_model_runner.py``: the vote is the method ``_allow_microbatching`` (vLLM 0.28 and
later), and before that the keyword ``allow_microbatching`` of ``_determine_batch_execution_and_padding``.
V2, ``vllm/v1/worker/gpu/model_runner.py``: ``execute_model`` votes ``self.ubatch_runner is not None`` (0.30
and later; before, V2 does not microbatch).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CLASS = "GPUModelRunner"


@dataclass(frozen=True, slots=True)
class HookPoints:
    """The hook points of one model runner class.

    Attributes:
        runner: ``v1`` or ``v2``.
        module: The module that has the class.
        vote: What carries the vote; None: this release's runner does not microbatch, so there is nothing to
            guard.
        missing: Methods, with the parameters needed, that the class lacks.
    """

    runner: str
    module: str
    vote: str | None
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Every step that this runner can cut can be guarded."""
        return not self.missing


_V1_MODULE = "vllm.v1.worker.gpu_model_runner"
_V2_MODULE = "vllm.v1.worker.gpu.model_runner"
MODULES = {"v1": _V1_MODULE, "v2": _V2_MODULE}

_V1_NEEDED = {"_update_states": ("scheduler_output",), "_may_reorder_batch": ("scheduler_output",)}
_V1_VOTE = {"_allow_microbatching": ("num_reqs", "num_scheduled_tokens_np")}
_V1_KEYWORD_VOTE = {
    "_determine_batch_execution_and_padding": ("num_reqs", "num_scheduled_tokens_np", "allow_microbatching")
}
_V2_NEEDED = {
    "finish_requests": ("scheduler_output",),
    "gather_batch_req_state": ("scheduler_output", "dummy_run"),
    "execute_model": ("scheduler_output",),
}


def read_hook_points(package: Path) -> list[HookPoints]:
    """The hook points of the vLLM sources in ``package``, the folder ``vllm``.

    Raises:
        OSError: A source file cannot be read (a missing V2 is no error).
        SyntaxError: Nor parsed.
    """
    points = [probe("v1", (package / "v1/worker/gpu_model_runner.py").read_text())]
    v2 = package / "v1/worker/gpu/model_runner.py"
    if v2.exists():
        points.append(probe("v2", v2.read_text()))
    return points


def probe(runner: str, source: str) -> HookPoints:
    """The hook points in the source text of a runner's module.

    Raises:
        SyntaxError: It does not parse.
    """
    methods = _methods(ast.parse(source))
    if runner == "v2":
        vote = _v2_vote(methods.get("execute_model"))
        missing = _missing(methods, _V2_NEEDED) if vote else []
        if vote == "allow_ubatching":
            missing.append("execute_model voting `self.ubatch_runner is not None`")
        return HookPoints(runner, _V2_MODULE, vote, tuple(missing))
    missing = _missing(methods, _V1_NEEDED)
    if "_allow_microbatching" in methods:
        return HookPoints(
            runner, _V1_MODULE, "_allow_microbatching", (*missing, *_missing(methods, _V1_VOTE))
        )
    return HookPoints(
        runner,
        _V1_MODULE,
        "_determine_batch_execution_and_padding(allow_microbatching=)",
        (*missing, *_missing(methods, _V1_KEYWORD_VOTE)),
    )


def _methods(module: ast.Module) -> dict[str, ast.FunctionDef]:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == CLASS:
            return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    return {}


def _missing(methods: dict[str, ast.FunctionDef], needed: Mapping[str, tuple[str, ...]]) -> list[str]:
    missing = []
    for name, parameters in needed.items():
        found = methods.get(name)
        known = {argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)} if found else set()
        if not known.issuperset(parameters):
            missing.append(f"{name}({', '.join(parameters)})")
    return missing


def _v2_vote(execute_model: ast.FunctionDef | None) -> str | None:
    """Say what V2 votes by: ``ubatch_runner``, ``allow_ubatching`` but not by that, or None: not at all."""
    if execute_model is None:
        return None
    for node in ast.walk(execute_model):
        if isinstance(node, ast.keyword) and node.arg == "allow_ubatching":
            return (
                "ubatch_runner" if "self.ubatch_runner is not None" in ast.unparse(node.value) else node.arg
            )
    return None
