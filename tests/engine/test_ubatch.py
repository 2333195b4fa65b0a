"""Cutting a step, and running its parts in turns."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ubatch_guard.engine.config import ParallelConfig
from ubatch_guard.engine.streams import Streams, Transfer
from ubatch_guard.engine.ubatch import (
    Overlap,
    Turns,
    check_ubatch_thresholds,
    is_last_ubatch_empty,
    maybe_create_ubatch_slices,
    run_ubatches,
)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    num_ubatches=st.integers(2, 4),
    padding=st.integers(0, 9),
)
def test_slices_hold_every_token_of_every_request_once(
    lengths: list[int], num_ubatches: int, padding: int
) -> None:
    num_tokens, padded = sum(lengths), sum(lengths) + padding
    if padded < num_ubatches or is_last_ubatch_empty(num_tokens, padded, num_ubatches):
        return
    slices, padded_slices = maybe_create_ubatch_slices(
        True, np.array(lengths, dtype=np.int32), padded, len(lengths), num_ubatches
    )
    assert slices is not None
    assert padded_slices is not None
    owners = np.repeat(np.arange(len(lengths)), lengths)
    seen = []
    for i, ubatch in enumerate(slices):
        tokens = owners[ubatch.token_slice]
        assert set(tokens) == set(range(len(lengths))[ubatch.request_slice])
        assert len(tokens) > 0
        assert ubatch.token_slice.start == padded // num_ubatches * i
        seen += list(range(num_tokens)[ubatch.token_slice])
    assert seen == list(range(num_tokens))
    assert slices[:-1] == padded_slices[:-1]
    assert padded_slices[-1].token_slice == slice(slices[-1].token_slice.start, padded)


def test_a_step_is_cut_only_when_asked() -> None:
    assert maybe_create_ubatch_slices(False, np.array([4, 4]), 8, 2, 2) == (None, None)


def test_the_split_point_can_be_given() -> None:
    slices, _ = maybe_create_ubatch_slices(True, np.array([4, 4]), 8, 2, 2, split_point=5)
    assert slices is not None
    assert [(s.token_slice.start, s.token_slice.stop) for s in slices] == [(0, 5), (5, 8)]
    assert [(s.request_slice.start, s.request_slice.stop) for s in slices] == [(0, 2), (1, 2)]


def test_so_can_the_cuts() -> None:
    slices, padded_slices = maybe_create_ubatch_slices(True, np.array([4, 4]), 9, 2, 3, split_point=[3, 4])
    assert slices is not None
    assert padded_slices is not None
    assert [(s.token_slice.start, s.token_slice.stop) for s in slices] == [(0, 3), (3, 4), (4, 8)]
    assert [(s.request_slice.start, s.request_slice.stop) for s in slices] == [(0, 1), (0, 1), (1, 2)]
    assert padded_slices[-1].token_slice == slice(4, 9)


def test_thresholds() -> None:
    config = ParallelConfig(num_ubatches=3, dbo_prefill_token_threshold=6, dbo_decode_token_threshold=2)
    assert check_ubatch_thresholds(config, 6, uniform_decode=False)
    assert not check_ubatch_thresholds(config, 5, uniform_decode=False)
    assert check_ubatch_thresholds(config, 3, uniform_decode=True)
    assert not check_ubatch_thresholds(config, 2, uniform_decode=True)  # fewer tokens than microbatches
    assert not check_ubatch_thresholds(ParallelConfig(), 9999, uniform_decode=False)


def test_turns_go_round_in_a_fixed_order() -> None:
    log: list[tuple[int, int]] = []

    def forward(index: int, overlap: Overlap) -> Tensor:
        for layer in range(3):
            log.append((layer, index))
            overlap(lambda: Transfer(torch.zeros(1), torch.zeros(1)))
        return torch.tensor(index)

    outputs = run_ubatches(3, Streams(), forward)
    assert [int(output) for output in outputs] == [0, 1, 2]
    assert log == [(layer, index) for layer in range(3) for index in range(3)]


def test_a_transfer_brings_its_own_tensor() -> None:
    def forward(index: int, overlap: Overlap) -> Tensor:
        sent = torch.full((2,), float(index))
        return overlap(lambda: Transfer(sent + 10, sent)) + overlap(lambda: Transfer(sent * 2, sent))

    assert [output.tolist() for output in run_ubatches(2, Streams(), forward)] == [[10.0] * 2, [13.0] * 2]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_an_exception_ends_the_step_and_leaves_no_thread(failing: int, layer: int) -> None:
    before = threading.active_count()
    finished = []

    def forward(index: int, overlap: Overlap) -> Tensor:
        for done in range(3):
            if (index, done) == (failing, layer):
                raise ZeroDivisionError("the kernel failed")
            overlap(lambda: Transfer(torch.zeros(1), torch.zeros(1)))
        if (index, 3) == (failing, layer):
            raise ZeroDivisionError("the kernel failed")
        finished.append(index)
        return torch.zeros(1)

    with pytest.raises(ZeroDivisionError, match="the kernel failed"):
        run_ubatches(3, Streams(), forward)
    assert threading.active_count() == before
    assert failing not in finished
    # A microbatch is through before the one that fails only if it comes first.
    assert finished == ([] if layer < 3 else list(range(failing)))


def test_a_transfer_that_fails_ends_the_step() -> None:
    def forward(index: int, overlap: Overlap) -> Tensor:
        def send() -> Transfer:
            raise ConnectionError("a rank is gone")

        return overlap(send)

    with pytest.raises(ConnectionError):
        run_ubatches(2, Streams(), forward)


def most_at_once() -> int:
    """The most microbatches found running at the same time."""
    running: set[int] = set()
    most = 0

    def forward(index: int, overlap: Overlap) -> Tensor:
        nonlocal most
        for _ in range(10):
            running.add(index)
            time.sleep(0.001)  # lets any other thread that may run do so
            most = max(most, len(running))
            running.discard(index)
            overlap(lambda: Transfer(torch.zeros(1), torch.zeros(1)))
        return torch.zeros(1)

    run_ubatches(3, Streams(), forward)
    return most


def test_one_microbatch_runs_at_a_time() -> None:
    assert most_at_once() == 1


def test_microbatches_that_do_not_wait_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(Turns, "wait", lambda *_: None)
    assert most_at_once() > 1
