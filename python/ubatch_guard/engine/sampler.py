"""Chooses the next token: the likeliest, or one drawn from the request's own seed."""

from __future__ import annotations

import torch
from torch import Tensor

from .request import SamplingParams


class Sampler:
    """Samples for many requests; each has its own random numbers, so a batch's order changes nothing."""

    def __init__(self) -> None:
        self._params: dict[str, SamplingParams] = {}
        self._generators: dict[str, torch.Generator] = {}

    def add_request(self, req_id: str, params: SamplingParams) -> None:
        """Remember how to sample for a request."""
        self._params[req_id] = params
        if params.temperature > 0:
            self._generators[req_id] = torch.Generator().manual_seed(params.seed)

    def remove_request(self, req_id: str) -> None:
        """Forget a request."""
        self._params.pop(req_id, None)
        self._generators.pop(req_id, None)

    def sample(self, logits: Tensor, req_ids: list[str]) -> list[int]:
        """One token per row of ``logits``, shape ``[len(req_ids), vocab_size]``."""
        token_ids: list[int] = logits.argmax(dim=-1).tolist()
        for row, req_id in enumerate(req_ids):
            generator = self._generators.get(req_id)
            if generator is not None:
                scaled = logits[row].double().cpu() / self._params[req_id].temperature
                # Gumbel noise: the largest of logits + noise is a draw from their softmax.
                uniform = torch.rand(len(scaled), generator=generator, dtype=torch.float64)
                token_ids[row] = int((scaled - torch.log(-torch.log(uniform.clamp_min(1e-300)))).argmax())
        return token_ids
