"""The entry point in ``vllm.general_plugins``: hooks model runners once they are imported.

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
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from ubatch_guard.log import logger
from ubatch_guard.settings import Settings
from ubatch_guard.vllm import poison
from ubatch_guard.vllm.attach import SETTINGS
from ubatch_guard.vllm.generation import Generation, read_hook_points
from ubatch_guard.vllm.generations import GENERATIONS, generation_of
from ubatch_guard.vllm.hooking import HookPointError, hook, lacking, unhook

RUNNERS = (
    "afd_plugin.v1.worker.attention_model_runner:AFDAttentionModelRunner",
    "vllm_ascend.worker.model_runner_v1:NPUModelRunner",
    "vllm_ascend.worker.v2.model_runner:NPUModelRunner",
)
"""Runners of others that are known, as ``module:Class``; ``UBATCH_GUARD_RUNNERS`` names further ones."""


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
    if settings.policy is None and not settings.poison:
        return
    for name in _modules(settings):
        if (module := sys.modules.get(name)) is not None:
            _hook_module(module, settings)
    _remove_finders()
    sys.meta_path.insert(0, _HookOnImport(settings))


def uninstall() -> None:
    """Take all hooks off again; one that another wrapper went around meanwhile stays and does nothing."""
    settings = next((f.settings for f in sys.meta_path if isinstance(f, _HookOnImport)), Settings())
    _remove_finders()
    for name in _modules(settings):
        for cls_name in _classes_in(name, settings):
            cls = getattr(sys.modules.get(name), cls_name, None)
            if cls is not None and SETTINGS in vars(cls):
                unhook(cls)
                # Any hook still in a chain finds the guard off.
                setattr(cls, SETTINGS, Settings(policy=None))


def _modules(settings: Settings) -> list[str]:
    """The modules of all runners, vLLM's own first."""
    others = (*RUNNERS, *settings.runners)
    names = [g.module for g in GENERATIONS] + [name.partition(":")[0] for name in others]
    return list(dict.fromkeys([*names, *(poison.MODULES if settings.poison else ())]))


def _classes_in(module: str, settings: Settings) -> Iterable[str]:
    own = [generation.cls for generation in GENERATIONS if generation.module == module]
    others = (name.split(":") for name in (*RUNNERS, *settings.runners))
    return [*own, *(cls for other, cls in others if other == module)]


def _hook_module(module: ModuleType, settings: Settings) -> None:
    if settings.poison:
        poison.hook_module(module, settings)
    if settings.policy is None:
        return
    generation = next((g for g in GENERATIONS if g.module == module.__name__), None)
    if generation is not None:
        _hook_vllms(generation, module, settings)
    for name in _classes_in(module.__name__, settings):
        if generation is None or name != generation.cls:
            _hook_other(module, name, settings)


def _hook_vllms(generation: Generation, module: ModuleType, settings: Settings) -> None:
    try:
        points = read_hook_points(generation, _package_of(generation, module))
    except (OSError, SyntaxError, ValueError) as error:
        _say_unguarded(f"the sources of {module.__name__} cannot be read ({error})", settings)
        return
    if points is not None and points.vote is None and not points.missing:
        # Before it microbatched, there is nothing to guard.
        return
    if points is None or points.missing:
        lacks = ", ".join(points.missing) if points else "its sources"
        _say_unguarded(f"{module.__name__} lacks {lacks}", settings)
        return
    _hook_class(getattr(module, generation.cls), generation, settings)


def _hook_other(module: ModuleType, name: str, settings: Settings) -> None:
    cls = getattr(module, name, None)
    generation = None if cls is None else generation_of(cls)
    if cls is None or generation is None:
        _say_unguarded(f"{module.__name__} has no model runner {name}", settings)
    elif names := lacking(cls, generation):
        _say_unguarded(f"{module.__name__}:{name} lacks {', '.join(names)}", settings)
    else:
        _hook_class(cls, generation, settings)


def _hook_class(cls: type, generation: Generation, settings: Settings) -> None:
    setattr(cls, SETTINGS, settings)
    hook(cls, generation)
    assert settings.policy is not None
    logger.info("ubatch-guard: %s.%s is guarded (%s)", cls.__module__, cls.__name__, settings.policy.value)


def _package_of(generation: Generation, module: ModuleType) -> Path:
    """The folder ``vllm`` that a runner's module was loaded from."""
    if module.__file__ is None:
        raise OSError("it has no file")
    return Path(module.__file__).parents[generation.module.count(".") - 1]


def _say_unguarded(what: str, settings: Settings) -> None:
    message = f"{what}: its steps are NOT guarded"
    if settings.strict:
        raise HookPointError(message)
    logger.error("ubatch-guard: %s", message)


def _remove_finders() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _HookOnImport)]


class _HookOnImport(importlib.abc.MetaPathFinder):
    """Finds the runner modules as everybody else does, and hooks them once they are loaded."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._modules = frozenset(_modules(settings))
        self._finding = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            spec.loader = _HookingLoader(spec.loader, functools.partial(_hook_module, settings=self.settings))
        return spec


class _HookingLoader(importlib.abc.Loader):
    """Loads a module by its own loader, then hooks it."""

    def __init__(self, loader: importlib.abc.Loader, hook_module: functools.partial[None]) -> None:
        self._loader = loader
        self._hook_module = hook_module

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What asks the module for its source later on (inspect) has to find the real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._hook_module(module)
