"""Puts hooks on a runner class, and takes them off again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ubatch_guard.vllm.generation import Generation, Hook

_MARK = "__ubatch_guard__"
_INHERITED = "__ubatch_guard_inherited__"


class HookPointError(RuntimeError):
    """A runner lacks a hook point that the guard needs."""


def hook(cls: type, generation: Generation) -> None:
    """Go around the methods of ``cls``, its own and those that it inherits; a second call changes nothing."""
    for name, goes_around in generation.hooks.items():
        method = getattr(cls, name, None)
        if method is None or is_hooked(vars(cls).get(name)):
            continue
        if name in vars(cls):
            wrapper = _around(method, goes_around)
        else:
            wrapper = _around_inherited(cls, name, goes_around)
        setattr(cls, name, wrapper)


def unhook(cls: type) -> None:
    """Take all hooks off ``cls``; one that another wrapper went around meanwhile stays."""
    for name, method in list(vars(cls).items()):
        if not is_ours(method):
            continue
        if hasattr(method, _INHERITED):
            delattr(cls, name)
        else:
            setattr(cls, name, method.__wrapped__)


def lacking(cls: type, generation: Generation) -> list[str]:
    """The methods without which a runner class cannot be guarded, and that it does not have."""
    return [
        " or ".join(names) for names in generation.required if not any(hasattr(cls, name) for name in names)
    ]


def is_ours(method: Any) -> bool:
    """Whether a method is one of our hooks."""
    return method is not None and getattr(method, _MARK, None) is method


def is_hooked(method: Any) -> bool:
    """Whether our hook is anywhere in a chain of wrappers."""
    while method is not None:
        if is_ours(method):
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _around(method: Callable[..., Any], goes_around: Hook) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return goes_around(self, method.__get__(self), *args, **kwargs)

    return _marked(wrapper)


def _around_inherited(cls: type, name: str, goes_around: Hook) -> Callable[..., Any]:
    """Looks the method up in each call: others may put something around a base's method later."""

    @functools.wraps(getattr(cls, name))
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return goes_around(self, getattr(super(cls, self), name), *args, **kwargs)

    setattr(wrapper, _INHERITED, True)
    return _marked(wrapper)


def _marked(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    # The wrapper itself: another's wrapper around it copies the attribute, and is not ours.
    setattr(wrapper, _MARK, wrapper)
    return wrapper
