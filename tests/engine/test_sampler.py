"""Sampling: greedy takes the likeliest, seeded draws from the softmax and from its own seed alone."""

from __future__ import annotations

import torch

from ubatch_guard.engine.request import SamplingParams
from ubatch_guard.engine.sampler import Sampler


def draws(logits: list[float], params: SamplingParams, count: int, beside: int = 0) -> list[int]:
    sampler = Sampler()
    sampler.add_request("a", params)
    names = ["a"]
    for i in range(beside):
        sampler.add_request(f"b{i}", SamplingParams(temperature=1.0, seed=i))
        names.insert(0, f"b{i}")
    rows = torch.tensor([logits] * len(names), dtype=torch.float64)
    return [sampler.sample(rows, names)[-1] for _ in range(count)]


def test_greedy_takes_the_largest() -> None:
    assert draws([0.0, 3.0, 2.9], SamplingParams(), 3) == [1, 1, 1]


def test_draws_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0]
    expected = torch.softmax(torch.tensor(logits) / 0.7, 0)
    got = draws(logits, SamplingParams(temperature=0.7, seed=5), 4000)
    shares = torch.bincount(torch.tensor(got), minlength=3) / len(got)
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)


def test_draws_depend_on_the_seed_and_on_nothing_else() -> None:
    logits = [0.0] * 50
    params = SamplingParams(temperature=1.0, seed=9)
    alone = draws(logits, params, 20)
    assert draws(logits, params, 20, beside=3) == alone
    assert draws(logits, SamplingParams(temperature=1.0, seed=10), 20) != alone
    assert len(set(alone)) > 5


def test_a_request_is_forgotten() -> None:
    sampler = Sampler()
    sampler.add_request("a", SamplingParams(temperature=1.0))
    sampler.remove_request("a")
    sampler.remove_request("a")
    assert sampler.sample(torch.tensor([[0.0, 1.0]]), ["a"]) == [1]
