"""Which batch orders an attention backend of vLLM accepts, told from the code of its metadata builder.

A builder that splits a batch calls one of two functions of ``v1/attention/backends/utils.py``:

- ``split_decodes_and_prefills`` takes the requests before the first longer query as decodes and the rest in
  any order: a short request behind that is simply treated as a prefill. So the decodes have to lead;
- ``split_decodes_prefills_and_extends`` wants three sections, with the readers of a prefix (extends) before
  its writers (prefills): no order helps there, and the one that there is has to stay.

A builder that calls neither takes any order. Whether one calls the second is read from the names in its
compiled code, so that a backend nobody has seen before is judged as well, and without sources. A builder that
reaches it through another function does so under decode context parallelism only
(``FlashAttentionMetadataBuilder`` by ``v1/worker/cp_utils.py``, in 0.30 to 0.34).
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ubatch_guard.step import OrderConstraint
from ubatch_guard.vllm import parallel_config

THREE_SECTIONS = "split_decodes_prefills_and_extends"


def order_constraint(
    backends: Iterable[Any],
    decode_threshold: int | None,
    decode_context_parallel: bool = False,
    prefill_context_parallel: bool = False,
) -> OrderConstraint:
    """The constraint of all ``backends`` together.

    Args:
        backends: The attention backend classes in use.
        decode_threshold: Longest query that counts as a decode, in tokens; None: the backends do not care.
        decode_context_parallel: Decode context parallelism is on.
        prefill_context_parallel: Prefill context parallelism is on, which deals out the tokens anew.
    """
    if prefill_context_parallel or any(keeps_order(backend, decode_context_parallel) for backend in backends):
        return OrderConstraint.FIXED
    return OrderConstraint.FREE if decode_threshold is None else OrderConstraint.DECODES_LEAD


def attention_groups(runner: Any) -> list[Any]:
    """All attention groups of a runner, of whichever KV cache group."""
    return [group for groups in getattr(runner, "attn_groups", ()) for group in groups]


def order_constraint_of(runner: Any, decode_threshold: int | None) -> OrderConstraint:
    """The constraint of the backends that ``runner`` uses, under its parallel configuration."""
    config = getattr(runner, "parallel_config", None)
    return order_constraint(
        [group.backend for group in attention_groups(runner)],
        decode_threshold,
        parallel_config.context_parallel(config, "decode"),
        parallel_config.context_parallel(config, "prefill"),
    )


def keeps_order(backend: Any, decode_context_parallel: bool) -> bool:
    """Whether the order has to stay: three sections, or a backend whose builder cannot be looked at."""
    get_builder = getattr(backend, "get_builder_cls", None)
    if get_builder is None:
        return True
    direct, through_another = _sections(get_builder())
    return direct or (through_another and decode_context_parallel)


@functools.cache
def _sections(builder: type) -> tuple[bool, bool]:
    """Whether a builder's code calls for three sections itself, and whether a function that it calls does."""
    direct = through_another = False
    for cls in builder.__mro__:
        for method in vars(cls).values():
            function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
            code = getattr(function, "__code__", None)
            if code is None:
                continue
            names = set(_names(code))
            direct |= THREE_SECTIONS in names
            for name in names:
                called = getattr(function, "__globals__", {}).get(name)
                if isinstance(called, types.FunctionType):
                    through_another |= THREE_SECTIONS in _names(called.__code__)
    return direct, through_another


def _names(code: types.CodeType) -> Iterator[str]:
    """The global and attribute names in a piece of code, and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def backends_in_sources(package: Path) -> tuple[list[str], list[str]]:
    """The attention backends in the vLLM sources in ``package``: those that are reordered, and the others.

    Class names, by what the file of each calls. Imports nothing.

    Raises:
        OSError: A source file cannot be read.
        SyntaxError: Nor parsed.
    """
    reordered: set[str] = set()
    kept: set[str] = set()
    for folder in ("v1/attention/backends", "models", "model_executor"):
        for path in (package / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "get_builder_cls" in text:
                tree = ast.parse(text)
                names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
                (kept if _calls(tree, THREE_SECTIONS) else reordered).update(filter(_is_backend, names))
    return sorted(reordered - kept), sorted(kept)


def _is_backend(name: str) -> bool:
    return name.endswith("Backend") and not name.startswith("_")


def _calls(tree: ast.Module, function: str) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
        for node in ast.walk(tree)
    )
