"""The environment variables ``UBATCH_GUARD_*``: read once, at start-up, and refused loudly when malformed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ubatch_guard.step import Policy

_PREFIX = "UBATCH_GUARD_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
_TRACE_MAX_BYTES = 256 << 20
_LOG_INTERVAL = 60.0
_DAY = 86400.0
_MAX_DEMOTED_TOKENS = 65536
_RUNNER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PLACEHOLDER = re.compile(r"\{[^{}/]*\}")
TRACE_PLACEHOLDERS = ("{pid}", "{rank}")
"""What a path pattern of traces may hold."""
_POLICIES: dict[str, Policy | None] = {"off": None, **{policy.value: policy for policy in Policy}}
_KNOWN = {
    "MODE",
    "TRACE",
    "TRACE_MAX_BYTES",
    "TRACE_IDS",
    "VERIFY",
    "STRICT",
    "LOG_INTERVAL",
    "MAX_DEMOTED_TOKENS",
    "RUNNERS",
    "POISON",
}


def unknown_placeholder(pattern: str) -> str | None:
    """The first placeholder of a trace's path pattern that nothing is known to fill."""
    return next((found for found in _PLACEHOLDER.findall(pattern) if found not in TRACE_PLACEHOLDERS), None)


class SettingsError(ValueError):
    """A ``UBATCH_GUARD_*`` variable, or a value of `Settings`, that cannot be; the message has both."""


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
        log_interval: Seconds between two log lines with the counters, a day at most; 0: none.
        hash_trace_ids: Request ids go into the trace as hashes.
        max_demoted_tokens: A step is run whole rather than reordered when this would take requests with more
            context tokens than this, over all of them, from the decodes to the prefills of the attention
            backends (docs/design.md, "The order"); None: whatever it takes.
        runners: Further model runner classes to guard, as ``module:Class``.
        poison: For tests and debugging, never for a live server: NaN in every slot until it is written.

    Raises:
        SettingsError: A number outside its bounds.
    """

    policy: Policy | None = Policy.REORDER
    trace: str | None = None
    trace_max_bytes: int = _TRACE_MAX_BYTES
    verify_every: int = 0
    strict: bool = False
    log_interval: float = _LOG_INTERVAL
    hash_trace_ids: bool = False
    max_demoted_tokens: int | None = _MAX_DEMOTED_TOKENS
    runners: tuple[str, ...] = ()
    poison: bool = False

    def __post_init__(self) -> None:
        # Settings that are made by hand must not raise in a step either.
        if not 0.0 <= self.log_interval <= _DAY:
            raise SettingsError(f"log_interval is {self.log_interval}; it is 0 to {_DAY:.0f} seconds")
        for name, least in (("trace_max_bytes", 1), ("verify_every", 0), ("max_demoted_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SettingsError(f"{name} is {value}; it is at least {least}")
        if self.trace is not None and (unknown := unknown_placeholder(self.trace)) is not None:
            raise SettingsError(
                f"{_PREFIX}TRACE is {self.trace!r}, with the unknown placeholder {unknown}; known are "
                + " and ".join(TRACE_PLACEHOLDERS)
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings in ``environment`` (default: ``os.environ``).

        ``UBATCH_GUARD_MODE`` = off | observe | veto | reorder, ``UBATCH_GUARD_TRACE`` = path pattern,
        ``UBATCH_GUARD_TRACE_MAX_BYTES`` and ``UBATCH_GUARD_VERIFY`` = whole numbers,
        ``UBATCH_GUARD_TRACE_IDS`` = plain | hash, ``UBATCH_GUARD_STRICT`` = a truth value,
        ``UBATCH_GUARD_LOG_INTERVAL`` = seconds, ``UBATCH_GUARD_MAX_DEMOTED_TOKENS`` = a whole number or none,
        ``UBATCH_GUARD_RUNNERS`` = ``module:Class`` with commas between, ``UBATCH_GUARD_POISON`` = a truth
        value.

        Raises:
            SettingsError: A value that is none of these, or an unknown ``UBATCH_GUARD_*`` name: a misspelt
                name must not leave the guard in a mode that nobody asked for.
        """
        source = os.environ if environment is None else environment
        given = {
            name[len(_PREFIX) :]: value.strip() for name, value in source.items() if name.startswith(_PREFIX)
        }
        if unknown := sorted(given.keys() - _KNOWN):
            names = ", ".join(_PREFIX + name for name in unknown)
            raise SettingsError(
                f"unknown {names}; known are {', '.join(_PREFIX + name for name in sorted(_KNOWN))}"
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
            hash_trace_ids=_one_of(given, "TRACE_IDS", ("plain", "hash")) == "hash",
            max_demoted_tokens=(
                None
                if given.get("MAX_DEMOTED_TOKENS", "").lower() == "none"
                else _whole_number(given, "MAX_DEMOTED_TOKENS", _MAX_DEMOTED_TOKENS, least=0)
            ),
            runners=_runners(given, "RUNNERS"),
            poison=_truth(given, "POISON"),
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
    if not 0.0 <= value <= _DAY:
        raise SettingsError(f"{_PREFIX}{name} is {text!r}; it is a number of seconds, 0 to {_DAY:.0f}")
    return value


def _one_of(given: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    text = given.get(name, "").lower() or values[0]
    if text not in values:
        raise SettingsError(f"{_PREFIX}{name} is {text!r}; it is one of {', '.join(values)}")
    return text


def _runners(given: Mapping[str, str], name: str) -> tuple[str, ...]:
    runners = tuple(part.strip() for part in given.get(name, "").split(",") if part.strip())
    for runner in runners:
        if not _RUNNER.fullmatch(runner):
            raise SettingsError(f"{_PREFIX}{name} has {runner!r}; a runner is named module:Class")
    return runners


def _truth(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "").lower()
    if text not in _TRUE | _FALSE:
        raise SettingsError(f"{_PREFIX}{name} is {text!r}; it is 1 or 0 (true, yes, on; false, no, off)")
    return text in _TRUE
