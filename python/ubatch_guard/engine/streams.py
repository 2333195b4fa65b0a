"""Transfers, and the two streams of dual-batch overlap: one computes, one communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Transfer:
    """A tensor on its way.

    Attributes:
        received: What arrives; not to be touched before the transfer is waited for.
        sent: What leaves; held here so that its memory is not reused while it is read.
        work: The collective, or None: the transfer is a local copy.
        done: On a device, the point in the communication stream at which it has arrived.
    """

    received: Tensor
    sent: Tensor
    work: torch.distributed.Work | None = None
    done: torch.cuda.Event | None = None


Send = Callable[[], Transfer]
"""Starts a transfer."""


class Streams:
    """On a CPU there are no streams: a collective of torch.distributed runs in threads of its own."""

    def start(self, send: Send) -> Transfer:
        """Start a transfer of what is computed so far; returns at once."""
        return send()

    def finish(self, transfer: Transfer) -> Tensor:
        """What the transfer brought; what is computed from here on may use it."""
        if transfer.work is not None:
            transfer.work.wait()
        return transfer.received

    def overlap(self, send: Send) -> Tensor:
        """Make a transfer with nothing to do meanwhile."""
        return self.finish(self.start(send))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The calling thread computes."""
        with torch.inference_mode():
            yield


class DeviceStreams(Streams):
    """The same on a CUDA or HIP device, which torch calls ``cuda`` both.

    The device runs each stream in order; events order one against the other, and no thread waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._communicate = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, send: Send) -> Transfer:
        """Queue a transfer behind what is computed so far."""
        self._communicate.wait_stream(self._compute)
        with torch.cuda.stream(self._communicate):
            transfer = send()
            if transfer.work is not None:
                transfer.work.wait()  # NCCL and RCCL: the stream waits, not the thread
            transfer.done = self._communicate.record_event()
        return transfer

    def finish(self, transfer: Transfer) -> Tensor:
        """What the transfer brought; the compute stream waits for it, and for no transfer started since."""
        assert transfer.done is not None
        self._compute.wait_event(transfer.done)
        transfer.received.record_stream(self._compute)
        return transfer.received

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The calling thread queues its work on the compute stream, behind what was queued before it came."""
        with torch.inference_mode(), torch.cuda.device(self._device):
            outer = torch.cuda.current_stream(self._device)
            self._compute.wait_stream(outer)
            with torch.cuda.stream(self._compute):
                yield
            outer.wait_stream(self._compute)


def make_streams(device: torch.device) -> Streams:
    """The streams of a device."""
    return DeviceStreams(device) if device.type == "cuda" else Streams()
