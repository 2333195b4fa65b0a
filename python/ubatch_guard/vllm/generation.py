"""What the package knows of one generation of vLLM's model runners: `Generation`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ubatch_guard.runner.guard import RunnerGuard
from ubatch_guard.vllm.contract import Needs, find_class, missing, parse

Hook = Callable[..., Any]
"""Goes around a method: takes the runner, the method it goes around, and the method's arguments."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of vLLM's model runners.

    Attributes:
        name: ``v1`` or ``v2``.
        module: Where its class is.
        cls: Its class.
        mark: The method by which a runner of this shape is known.
        hooks: Method -> hook; those that a runner does not have are left out.
        required: Hooks without which a runner of this shape cannot be guarded; one of each tuple will do.
        contract: What is read of vLLM.
        vote: From the runner's class to what it votes by (None: by nothing) and what its vote lacks.
        guard_of: The guard of a runner of this shape; None: it is off.
        microbatches: Whether these sources, the folder ``vllm``, run microbatches on this runner at all.
    """

    name: str
    module: str
    cls: str
    mark: str
    hooks: Mapping[str, Hook]
    required: tuple[tuple[str, ...], ...]
    contract: tuple[Needs, ...]
    vote: Callable[[ast.ClassDef], tuple[str | None, list[str]]]
    guard_of: Callable[[Any], RunnerGuard | None]
    microbatches: Callable[[Path], bool]

    def source(self, package: Path) -> Path:
        """The file of its module in ``package``, the folder ``vllm``."""
        return package.joinpath(*self.module.split(".")[1:]).with_suffix(".py")


@dataclass(frozen=True, slots=True)
class HookPoints:
    """What the sources of a vLLM have of one generation.

    Attributes:
        runner: ``v1`` or ``v2``.
        module: The module of the runner.
        vote: What carries the vote; None: this release's runner does not microbatch, so there is nothing to
            guard.
        missing: What the guard needs and these sources lack.
    """

    runner: str
    module: str
    vote: str | None
    missing: tuple[str, ...]


def read_hook_points(generation: Generation, package: Path) -> HookPoints | None:
    """The hook points of a generation in the vLLM sources in ``package``; None: they do not have it.

    Raises:
        OSError: A source file cannot be read.
        SyntaxError: Nor parsed.
    """
    source = generation.source(package)
    if not source.exists():
        return None
    cls = find_class(parse(source), generation.cls)
    if cls is None:
        return HookPoints(
            generation.name, generation.module, None, (f"{generation.module}.{generation.cls}",)
        )
    if not generation.microbatches(package):
        return HookPoints(generation.name, generation.module, None, ())
    vote, lacking = generation.vote(cls)
    return HookPoints(
        generation.name, generation.module, vote, (*lacking, *missing(package, generation.contract))
    )
