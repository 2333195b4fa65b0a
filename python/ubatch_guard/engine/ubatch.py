"""Cuts a step into microbatches and runs them in turns.

A microbatch is a thread. One runs at a time; at every expert exchange it starts its transfer and hands over
to the next, so that one microbatch computes while the tokens of another travel. The turns go round in a fixed
order, and microbatch i reaches each layer before microbatch i + 1 does. That is why a cut has a hazard: what
microbatch i reads in a layer, microbatch i + 1 has not written yet.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from ubatch_guard.step import IntArray

from .config import ParallelConfig
from .streams import Send, Streams


@dataclass(frozen=True, slots=True)
class UBatchSlice:
    """The requests and the tokens of one microbatch; a request at a cut is in both."""

    request_slice: slice
    token_slice: slice

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return int(self.token_slice.stop - self.token_slice.start)


UBatchSlices = list[UBatchSlice]


def check_ubatch_thresholds(config: ParallelConfig, num_tokens: int, uniform_decode: bool) -> bool:
    """Whether a step is large enough to be worth cutting."""
    if not config.use_ubatching:
        return False
    threshold = config.dbo_decode_token_threshold if uniform_decode else config.dbo_prefill_token_threshold
    return num_tokens >= max(threshold, config.num_ubatches)  # no microbatch is empty


def is_last_ubatch_empty(num_tokens: int, num_tokens_padded: int, num_ubatches: int) -> bool:
    """Whether the last microbatch of the padded step would hold nothing but padding."""
    return num_tokens_padded // num_ubatches * (num_ubatches - 1) >= num_tokens


def multiples(num_tokens_padded: int, num_ubatches: int, size: int | None = None) -> list[int]:
    """The cuts that make microbatches of ``size`` tokens, but for the last; None: of equal sizes."""
    size = num_tokens_padded // num_ubatches if size is None else size
    return [size * i for i in range(1, num_ubatches)]


def maybe_create_ubatch_slices(
    should_ubatch: bool,
    num_scheduled_tokens: IntArray,
    num_tokens_padded: int,
    num_reqs_padded: int,
    num_ubatches: int,
    split_point: Sequence[int] | int | None = None,
) -> tuple[UBatchSlices | None, UBatchSlices | None]:
    """Cut a step at multiples of ``split_point`` tokens, or at the very cuts it holds.

    Args:
        should_ubatch: Cut at all.
        num_scheduled_tokens: int, shape ``[num_reqs]``, in batch order.
        num_tokens_padded: Tokens with padding, the same on every rank.
        num_reqs_padded: Requests with padding.
        num_ubatches: Microbatches.
        split_point: Tokens of each microbatch but the last; None: ``num_tokens_padded // num_ubatches``; or
            the cuts, one fewer than microbatches.

    Returns:
        The slices without padding, and those with all padding in the last one; None twice: do not cut.
    """
    if not should_ubatch:
        return None, None
    if split_point is None or isinstance(split_point, int):
        split_point = multiples(num_tokens_padded, num_ubatches, split_point)
    ends = np.cumsum(num_scheduled_tokens)
    num_tokens = int(ends[-1])
    slices = []
    for start, stop in pairwise([0, *split_point, num_tokens]):
        first_req = int(np.searchsorted(ends, start, side="right"))
        last_req = int(np.searchsorted(ends, stop, side="left"))
        slices.append(UBatchSlice(slice(first_req, last_req + 1), slice(start, stop)))
    last = slices[-1]
    padded = UBatchSlice(
        slice(last.request_slice.start, num_reqs_padded), slice(last.token_slice.start, num_tokens_padded)
    )
    return slices, [*slices[:-1], padded]


class UBatchAbortedError(RuntimeError):
    """Another microbatch of the step failed."""


class Turns:
    """Lets one microbatch run at a time, round and round."""

    def __init__(self, num_ubatches: int) -> None:
        self._changed = threading.Condition()
        self._order = deque(range(num_ubatches))
        self._failed = False

    def wait(self, index: int) -> None:
        """Wait for the turn of microbatch ``index``.

        Raises:
            UBatchAbortedError: Another microbatch failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._order[0] == index)
            if self._failed:
                raise UBatchAbortedError("another microbatch of the step failed")

    def hand_over(self) -> None:
        """The running microbatch goes to the end of the line."""
        with self._changed:
            self._order.rotate(-1)
            self._changed.notify_all()

    def leave(self) -> None:
        """The running microbatch is through."""
        with self._changed:
            self._order.popleft()
            self._changed.notify_all()

    def fail(self) -> None:
        """Wake everyone who waits: the step is over."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


Overlap = Callable[[Send], Tensor]
"""Makes a transfer and returns what it brought."""


def run_ubatches(
    num_ubatches: int, streams: Streams, forward: Callable[[int, Overlap], Tensor]
) -> list[Tensor]:
    """Run the microbatches of a step.

    Args:
        num_ubatches: Microbatches.
        streams: Where they compute and communicate.
        forward: Runs microbatch i, and calls what it is given for each transfer.

    Returns:
        What ``forward`` returned, in the order of the microbatches.

    Raises:
        Exception: Whatever the first microbatch to fail raised; no thread is left running or waiting.
    """
    turns = Turns(num_ubatches)
    outputs: list[Tensor | None] = [None] * num_ubatches
    errors: list[BaseException] = []

    def run(index: int) -> None:
        def overlap(send: Send) -> Tensor:
            transfer = streams.start(send)
            turns.hand_over()
            turns.wait(index)
            return streams.finish(transfer)

        try:
            turns.wait(index)
            with streams.computing():
                outputs[index] = forward(index, overlap)
            turns.leave()
        except UBatchAbortedError:
            pass  # the one that failed has said why
        except BaseException as error:
            errors.append(error)
            turns.fail()

    threads = [threading.Thread(target=run, args=(i,), name=f"ubatch-{i}") for i in range(num_ubatches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [output for output in outputs if output is not None]
