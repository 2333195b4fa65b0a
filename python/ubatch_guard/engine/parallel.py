"""What ranks do together: vote on a step, and exchange expert tokens. All of it is torch.distributed.

Each rank runs its own requests and holds its own share of the experts, so every rank takes part in every
layer of every step, be it with nothing to send.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .config import ParallelConfig
from .streams import Transfer
from .ubatch import check_ubatch_thresholds, is_last_ubatch_empty


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run.

    Attributes:
        size: How many there are.
        rank: Which one this is.
        device_group: Group of the expert exchange; None: the default group.
        host_group: Group of the votes, which stay on the CPU; None: the default group.
    """

    size: int = 1
    rank: int = 0
    device_group: dist.ProcessGroup | None = field(default=None, compare=False)
    host_group: dist.ProcessGroup | None = field(default=None, compare=False)

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over the ranks, in place; a CPU tensor."""
        if self.size > 1:
            dist.all_reduce(values, group=self.host_group)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor([int(flag)], dtype=torch.int32))[0])

    def min(self, value: int | None) -> int | None:
        """Smallest value of any rank that has one."""
        highest = 2**31 - 1
        values = torch.tensor([highest if value is None else value], dtype=torch.int32)
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self.host_group)
        smallest = int(values[0])
        return None if smallest == highest else smallest

    def all_to_all(self, sent: Tensor, sent_rows: list[int], received_rows: list[int]) -> Transfer:
        """Send ``sent_rows[i]`` rows of ``sent`` to rank i, and receive ``received_rows[i]`` from it."""
        if self.size == 1:
            return Transfer(sent.clone(), sent)
        received = sent.new_empty((sum(received_rows), *sent.shape[1:]))
        work = dist.all_to_all_single(
            received, sent, received_rows, sent_rows, group=self.device_group, async_op=True
        )
        return Transfer(received, sent, work)


def device_of_rank(kind: str) -> torch.device:
    """The device that this rank runs on: ``cpu``, or one of the machine's ``cuda`` devices in turn.

    Raises:
        ValueError: The machine has no ``cuda`` device.
    """
    if kind == "cpu":
        return torch.device(kind)
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA or HIP device, or torch was built without")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def init_ranks(device: torch.device, timeout_s: float = 60.0) -> Ranks:
    """Join the run that ``torchrun`` started, or be a run of one rank.

    Args:
        device: ``cpu`` takes gloo; ``cuda`` takes NCCL (RCCL in a ROCm build of torch), and gloo for votes.
        timeout_s: Seconds after which a rank that does not answer is an error.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return Ranks(size, dist.get_rank())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timeout)
    votes = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(votes, dist.ProcessGroup)  # every rank is a member
    return Ranks(size, dist.get_rank(), None, votes)


def coordinate_batch_across_dp(
    ranks: Ranks,
    config: ParallelConfig,
    num_tokens: int,
    allow_microbatching: bool,
    uniform_decode: bool,
) -> tuple[bool, bool, int]:
    """Vote on a step: it is cut only if every rank wants to, and is padded to the largest rank's tokens.

    Args:
        ranks: Those who vote.
        config: The thresholds.
        num_tokens: Tokens of this rank; 0: it is idle.
        allow_microbatching: This rank's word; a "no" has to be said here, refusing afterwards leaves the
            others waiting.
        uniform_decode: Every query of this rank is one token.

    Returns:
        Whether the step is cut; whether it would be if every rank allowed it; the padded number of tokens.
    """
    large_enough = check_ubatch_thresholds(config, num_tokens, uniform_decode)
    votes = torch.zeros(3, ranks.size, dtype=torch.int32)
    votes[:, ranks.rank] = torch.tensor([num_tokens, large_enough, allow_microbatching], dtype=torch.int32)
    tokens, large, allowed = ranks.sum(votes).tolist()
    padded = max(tokens)
    eligible = all(large) and not is_last_ubatch_empty(min(tokens), padded, config.num_ubatches)
    return eligible and all(allowed), eligible, padded


class ExpertRoute:
    """Where the (token, expert) pairs of a microbatch go, and what comes here.

    Pairs travel sorted by expert. Experts are dealt out in equal runs: rank r holds
    ``r * num_local .. (r + 1) * num_local - 1``.
    """

    def __init__(self, ranks: Ranks, experts: Tensor, num_experts: int) -> None:
        """Plan the exchange.

        Args:
            ranks: Those who exchange.
            experts: int64, shape ``[num_tokens, num_experts_per_tok]``: chosen experts.
            num_experts: Experts on all ranks; a multiple of their number.
        """
        pairs = experts.flatten()
        self._ranks = ranks
        self._order = torch.argsort(pairs, stable=True)
        self._tokens = self._order // experts.shape[1]
        counts = torch.bincount(pairs, minlength=num_experts)
        arriving = counts
        if ranks.size > 1:
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts, group=ranks.device_group)
        self._sent_rows: list[int] = counts.view(ranks.size, -1).sum(1).tolist()
        # [source rank][local expert]: rows arrive in this order
        self._arriving: list[list[int]] = arriving.view(ranks.size, -1).tolist()
        self._received_rows = [sum(row) for row in self._arriving]

    def dispatch(self, hidden: Tensor) -> Transfer:
        """Send each token (``[num_tokens, hidden_size]``) to the ranks of its experts."""
        return self._ranks.all_to_all(hidden[self._tokens], self._sent_rows, self._received_rows)

    def combine(self, outputs: Tensor) -> Transfer:
        """Send the experts' outputs back to where the tokens came from."""
        return self._ranks.all_to_all(outputs, self._received_rows, self._sent_rows)

    def rows_of_experts(self) -> list[list[slice]]:
        """Per local expert, the slices of the received rows that are for it, one per source rank."""
        rows: list[list[slice]] = [[] for _ in self._arriving[0]]
        start = 0
        for counts in self._arriving:
            for expert, count in enumerate(counts):
                if count:
                    rows[expert].append(slice(start, start + count))
                start += count
        return rows

    def restore(self, returned: Tensor, num_experts_per_tok: int) -> Tensor:
        """Put returned rows in token order: ``[num_tokens, num_experts_per_tok, hidden_size]``."""
        restored = torch.empty_like(returned)
        restored[self._order] = returned
        return restored.view(-1, num_experts_per_tok, returned.shape[-1])
