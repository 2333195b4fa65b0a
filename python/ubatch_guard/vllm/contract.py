"""Whether a vLLM has what the guard reads of it, by name: told from the sources, nothing is imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Needs:
    """Names that one class has to have.

    Attributes:
        module: Where it is, such as ``vllm.v1.core.sched.output``.
        cls: The class.
        names: Attributes and methods; a method is written with the parameters that are passed to it,
            ``name(first, second)``.
    """

    module: str
    cls: str
    names: tuple[str, ...]


def missing(package: Path, contract: Iterable[Needs]) -> list[str]:
    """What the vLLM sources in ``package``, the folder ``vllm``, lack of a contract.

    Raises:
        OSError: A source file cannot be read.
        SyntaxError: Nor parsed.
    """
    lacking = []
    for needs in contract:
        path = package.joinpath(*needs.module.split(".")[1:]).with_suffix(".py")
        if not path.exists():
            lacking.append(f"the module {needs.module}")
            continue
        cls = find_class(parse(path), needs.cls)
        if cls is None:
            lacking.append(f"{needs.module}.{needs.cls}")
            continue
        members = members_of(cls)
        lacking += [f"{needs.module}.{needs.cls}.{name}" for name in needs.names if not has(members, name)]
    return lacking


def has(members: Mapping[str, frozenset[str]], name: str) -> bool:
    """Whether a class with these `members_of` has a name, written as in `Needs`."""
    method, _, parameters = name.rstrip(")").partition("(")
    return method in members and members[method].issuperset(filter(None, parameters.split(", ")))


@functools.lru_cache(maxsize=32)
def parse(path: Path) -> ast.Module:
    """The syntax tree of a source file. Raises OSError, SyntaxError."""
    return ast.parse(path.read_text(encoding="utf-8"))


def find_class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    """The class of this name at the top of a module."""
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def find_method(cls: ast.ClassDef | None, name: str) -> ast.FunctionDef | None:
    """The method of this name that a class itself defines."""
    body = [] if cls is None else cls.body
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def members_of(cls: ast.ClassDef) -> dict[str, frozenset[str]]:
    """Fields, methods with their parameters, and what methods assign to ``self``."""
    members: dict[str, frozenset[str]] = {}
    for node in ast.walk(cls):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for leaf in (leaf for target in targets for leaf in ast.walk(target)):
            if isinstance(leaf, ast.Name) and node in cls.body:
                members[leaf.id] = frozenset()
            elif isinstance(leaf, ast.Attribute) and ast.unparse(leaf.value) == "self":
                members[leaf.attr] = frozenset()
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            members[node.name] = frozenset(argument.arg for argument in arguments)
    return members
