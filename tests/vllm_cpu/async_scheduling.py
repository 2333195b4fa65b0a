"""Asynchronous scheduling on a CPU: a step is scheduled before the one before it has answered.

vLLM switches it off there (``CpuPlatform.check_and_update_config``), for a CPU gains nothing by it; nothing
else is in the way but the streams and events that copy the answers, which a CPU does not need.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch


class _Nothing:
    """A stream or an event of a device that does everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


def allow_async_scheduling() -> None:
    """Let engines of this process, made from now on, schedule asynchronously if they are asked to."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    torch.cuda.Event = torch.cuda.Stream = _Nothing
    torch.cuda.current_stream = lambda device=None: _Nothing()
    torch.cuda.stream = lambda stream: nullcontext()
