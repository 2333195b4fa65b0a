"""The guard's log in an engine. What only reports raises nothing: it must not touch a step."""

from __future__ import annotations

import contextlib
import logging

# Below "vllm", so that inside vLLM its handlers and format apply.
logger = logging.getLogger("vllm.ubatch_guard")


def say(message: str, level: int = logging.WARNING) -> None:
    """Log ``message``; what a handler or filter of the engine's raises is dropped."""
    with contextlib.suppress(Exception):
        logger.log(level, "%s", message, stacklevel=2)


def described(error: BaseException) -> str:
    """Type and message of an exception; one that cannot say its own is no reason to raise another."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: ?"
