"""What the guard keeps at a runner, all of it under one key: `Attachment`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ubatch_guard.kv_cache_groups import EngineGroups, read_groups
from ubatch_guard.log import described
from ubatch_guard.runner.guard import RunnerGuard
from ubatch_guard.settings import Settings
from ubatch_guard.vllm.followed_rows import AllRows

_KEY = "_ubatch_guard"
SETTINGS = "ubatch_guard_settings"
"""The attribute, of a runner or its class, with what is asked of its guard."""

MakeRows = Callable[[Any, EngineGroups, Settings], AllRows]
"""From a runner, its KV cache groups and the settings to the rows that its guard goes by."""


@dataclass(slots=True)
class Attachment:
    """What the guard keeps at a runner.

    Attributes:
        settings: What the guard was made for, and
        kv_cache_config: likewise; another one, and another guard is made.
        guard: None: it is off.
        withheld: V2: the runner's ``ubatch_runner`` while a vote "no" keeps it away.
        watched: V2: the ``ubatch_runner`` whose ``prepare`` is watched.
    """

    settings: Settings
    kv_cache_config: Any
    guard: RunnerGuard | None
    withheld: Any = None
    watched: Any = None


def attachment_of(runner: Any, make_rows: MakeRows) -> Attachment:
    """What is attached to ``runner``, as the first hook of the step saw to it (`attach`)."""
    attachment: Attachment | None = runner.__dict__.get(_KEY)
    return attach(runner, make_rows) if attachment is None else attachment


def attach(runner: Any, make_rows: MakeRows) -> Attachment:
    """The same, made anew for other settings or KV caches. Never raises in a step."""
    attachment: Attachment | None = runner.__dict__.get(_KEY)
    settings = getattr(runner, SETTINGS, None)
    kv_cache_config = getattr(runner, "kv_cache_config", None)
    if (
        attachment is not None
        and attachment.settings is settings
        and attachment.kv_cache_config is kv_cache_config
    ):
        return attachment
    if settings is None:
        settings = Settings.from_environment()
        setattr(runner, SETTINGS, settings)
    made = Attachment(settings, kv_cache_config, None)
    if attachment is not None:
        made.watched, made.withheld = attachment.watched, attachment.withheld
        if attachment.guard is not None:
            attachment.guard.retire()
    if settings.policy is not None:
        made.guard = _make_guard(runner, kv_cache_config, settings, make_rows)
    runner.__dict__[_KEY] = made
    return made


def _make_guard(runner: Any, kv_cache_config: Any, settings: Settings, make_rows: MakeRows) -> RunnerGuard:
    parallel_config = getattr(runner, "parallel_config", None)
    name = str(getattr(parallel_config, "data_parallel_rank", 0))
    try:
        groups = read_groups(kv_cache_config, getattr(parallel_config, "decode_context_parallel_size", 1))
        guard = RunnerGuard(make_rows(runner, groups, settings), settings, name, type(runner).__name__)
    except Exception as error:
        # Also what the core refuses: columns of no tokens, a pool that does not fit into memory.
        why = f"the KV cache groups are not understood ({described(error)})"
        nothing = make_rows(runner, EngineGroups((), (), are_all=False), settings)
        return RunnerGuard(nothing, settings, name, type(runner).__name__, why)
    for kind in groups.assumed:
        message = f"a KV cache group of kind {kind} is not known; it counts as read as a whole"
        guard.report.once(kind, message, logging.WARNING)
    return guard
