"""The entry point in ``vllm.general_plugins``: hooks vLLM's model runners once they are imported.

vLLM runs `register` in the front end, the engine core and every worker, in some of them more than once, and
most of these never run a step. So `register` imports nothing of vLLM: it hooks a runner class that is there
already, and has the import system hook the others. An exception out of `register` stops the process: this
is how malformed settings are refused.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ubatch_guard.runner_mixin import V1_HOOKS, V1_KEYWORD_HOOKS, V2_HOOKS
from ubatch_guard.settings import Settings
from ubatch_guard.vllm.hook_points import CLASS, MODULES, probe

logger = logging.getLogger("vllm.ubatch_guard")

_MARK = "__ubatch_guard__"
_SETTINGS = "ubatch_guard_settings"


class HookPointError(RuntimeError):
    """A vLLM lacks a hook point that the guard needs; raised under ``UBATCH_GUARD_STRICT=1``."""


def register() -> None:
    """Guard the model runners of this process as the environment says; the entry point.

    Raises:
        SettingsError: A ``UBATCH_GUARD_*`` variable is malformed.
        HookPointError: A runner that is loaded lacks a hook point, and the guard is strict.
    """
    install(Settings.from_environment())


def install(settings: Settings) -> None:
    """Hook every runner class, now or when it is imported; a second call changes the settings only.

    Raises:
        HookPointError: As `register`.
    """
    if settings.policy is None:
        return
    for runner, module_name in MODULES.items():
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, CLASS):
            _hook_module(runner, module, settings)
    for finder in list(sys.meta_path):
        if isinstance(finder, _HookOnImport):
            sys.meta_path.remove(finder)
    sys.meta_path.insert(0, _HookOnImport(settings))


def uninstall() -> None:
    """Take all hooks off again; one that another wrapper went around meanwhile stays and does nothing."""
    for finder in list(sys.meta_path):
        if isinstance(finder, _HookOnImport):
            sys.meta_path.remove(finder)
    for module_name in MODULES.values():
        cls = getattr(sys.modules.get(module_name), CLASS, None)
        if cls is None or _SETTINGS not in cls.__dict__:
            continue
        for name, method in list(vars(cls).items()):
            if _is_ours(method):
                setattr(cls, name, method.__wrapped__)
        # Any hook still in a chain finds the guard off.
        setattr(cls, _SETTINGS, Settings(policy=None))


def _hook_module(runner: str, module: ModuleType, settings: Settings) -> None:
    points = probe(runner, inspect.getsource(module))
    if points.vote is None:
        return
    if points.missing:
        message = f"{points.module} lacks {', '.join(points.missing)}: its steps are NOT guarded"
        if settings.strict:
            raise HookPointError(message)
        logger.error("ubatch-guard: %s; vLLM's own verdict stays in force", message)
        return
    hooks = V2_HOOKS
    if runner == "v1":
        hooks = V1_HOOKS if points.vote in V1_HOOKS else V1_KEYWORD_HOOKS
    cls = getattr(module, CLASS)
    setattr(cls, _SETTINGS, settings)
    for name, hook in hooks.items():
        method = getattr(cls, name)
        if not _is_hooked(method):
            setattr(cls, name, _hooked(method, hook))
    assert settings.policy is not None
    logger.info("ubatch-guard: model runner %s is guarded (%s)", runner, settings.policy.value)


def _hooked(method: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(self, method.__get__(self), *args, **kwargs)

    # The wrapper itself: another's wrapper around it copies the attribute, and is not ours.
    setattr(wrapper, _MARK, wrapper)
    return wrapper


def _is_ours(method: Any) -> bool:
    return method is not None and getattr(method, _MARK, None) is method


def _is_hooked(method: Any) -> bool:
    """Whether our hook is anywhere in a chain of wrappers."""
    while method is not None:
        if _is_ours(method):
            return True
        method = getattr(method, "__wrapped__", None)
    return False


class _HookOnImport(importlib.abc.MetaPathFinder):
    """Finds the runner modules as everybody else does, and hooks them once they are loaded."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._runners = {module: runner for runner, module in MODULES.items()}
        self._finding = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        runner = self._runners.get(fullname)
        if runner is None or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            spec.loader = _HookingLoader(spec.loader, runner, self.settings)
        return spec


class _HookingLoader(importlib.abc.Loader):
    """Loads a module by its own loader, then hooks it."""

    def __init__(self, loader: importlib.abc.Loader, runner: str, settings: Settings) -> None:
        self._loader = loader
        self._runner = runner
        self._settings = settings

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What asks the module for its source later on (inspect) has to find the real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _hook_module(self._runner, module, self._settings)
