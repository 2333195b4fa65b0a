"""A request: what its user asks for, and how far the scheduler has come with it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens.

    Attributes:
        max_tokens: Tokens to generate.
        temperature: 0: greedy.
        seed: Seed of the request's own random numbers; used where ``temperature`` is above 0.
        stop_token_id: Token that ends the request and its output; None: only ``max_tokens`` ends it.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    stop_token_id: int | None = None


@dataclass(eq=False, slots=True)
class Request:
    """A request as the scheduler sees it.

    Attributes:
        num_computed_tokens: Tokens whose KV is computed, or will be once the steps scheduled so far have run.
        num_preemptions: How often its blocks were taken away.
        block_hashes: Chained hash of each full block of ``token_ids``: equal hashes mean equal prefixes.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_size: int
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    token_ids: list[int] = field(init=False)
    block_hashes: list[bytes] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.req_id} has an empty prompt")
        self.token_ids = list(self.prompt_token_ids)
        self._hash_full_blocks()

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether all its tokens are generated."""
        params, output = self.sampling_params, self.output_token_ids
        return len(output) >= params.max_tokens or bool(output and output[-1] == params.stop_token_id)

    def append_output_token(self, token_id: int) -> None:
        """Take a sampled token."""
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
        self._hash_full_blocks()

    def _hash_full_blocks(self) -> None:
        for end in range(
            (len(self.block_hashes) + 1) * self.block_size, self.num_tokens + 1, self.block_size
        ):
            parent = self.block_hashes[-1] if self.block_hashes else b""
            tokens = array("q", self.token_ids[end - self.block_size : end]).tobytes()
            self.block_hashes.append(blake2b(parent + tokens, digest_size=16).digest())
