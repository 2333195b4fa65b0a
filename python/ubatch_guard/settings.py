"""The environment variables ``UBATCH_GUARD_*``: read once, at start-up, and refused loudly when malformed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ubatch_guard.step import Policy

_PREFIX = "UBATCH_GUARD_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
_TRACE_MAX_BYTES = 256 << 20
_LOG_INTERVAL = 60.0
_POLICIES: dict[str, Policy | None] = {"off": None, **{policy.value: policy for policy in Policy}}


class SettingsError(ValueError):
    """A ``UBATCH_GUARD_*`` variable that cannot be understood; the message has its name and value."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the guard of an engine is asked to do.

    Attributes:
        policy: What to do about a step with an unsafe cut; None: the guard is off.
        trace: Path pattern of the step trace that each worker writes, or None. ``{pid}`` and ``{rank}`` (the
            data-parallel rank) are replaced; a pattern without ``{pid}`` gets ``.{pid}`` before its suffixes.
        trace_max_bytes: Size at which a trace ends, in bytes.
        verify_every: Compare the mirror with the runner's own block table every this many steps; 0: never.
        strict: A hook point that is missing stops the start, instead of leaving vLLM's own verdict in force.
        log_interval: Seconds between two log lines with the counters; 0: none.
    """

    policy: Policy | None = Policy.REORDER
    trace: str | None = None
    trace_max_bytes: int = _TRACE_MAX_BYTES
    verify_every: int = 0
    strict: bool = False
    log_interval: float = _LOG_INTERVAL

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings in ``environment`` (default: ``os.environ``).

        ``UBATCH_GUARD_MODE`` = off | observe | veto | reorder, ``UBATCH_GUARD_TRACE`` = path pattern,
        ``UBATCH_GUARD_TRACE_MAX_BYTES`` and ``UBATCH_GUARD_VERIFY`` = whole numbers,
        ``UBATCH_GUARD_STRICT`` = a truth value, ``UBATCH_GUARD_LOG_INTERVAL`` = seconds.

        Raises:
            SettingsError: A value that is none of these, or an unknown ``UBATCH_GUARD_*`` name: a misspelt
                name must not leave the guard in a mode that nobody asked for.
        """
        source = os.environ if environment is None else environment
        given = {
            name[len(_PREFIX) :]: value.strip() for name, value in source.items() if name.startswith(_PREFIX)
        }
        known = {"MODE", "TRACE", "TRACE_MAX_BYTES", "VERIFY", "STRICT", "LOG_INTERVAL"}
        if unknown := sorted(given.keys() - known):
            names = ", ".join(_PREFIX + name for name in unknown)
            raise SettingsError(
                f"unknown {names}; known are {', '.join(_PREFIX + name for name in sorted(known))}"
            )

        mode = given.get("MODE", "reorder").lower()
        if mode not in _POLICIES:
            raise SettingsError(f"{_PREFIX}MODE is {mode!r}; it is one of {', '.join(_POLICIES)}")
        return cls(
            policy=_POLICIES[mode],
            trace=given.get("TRACE") or None,
            trace_max_bytes=_whole_number(given, "TRACE_MAX_BYTES", _TRACE_MAX_BYTES, least=1),
            verify_every=_whole_number(given, "VERIFY", 0, least=0),
            strict=_truth(given, "STRICT"),
            log_interval=_seconds(given, "LOG_INTERVAL", _LOG_INTERVAL),
        )


def _whole_number(given: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = given.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise SettingsError(f"{_PREFIX}{name} is {text!r}; it is a whole number of at least {least}")
    return int(text)


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise SettingsError(f"{_PREFIX}{name} is {text!r}; it is a number of seconds, 0 or more")
    return value


def _truth(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "").lower()
    if text not in _TRUE | _FALSE:
        raise SettingsError(f"{_PREFIX}{name} is {text!r}; it is 1 or 0 (true, yes, on; false, no, off)")
    return text in _TRUE
