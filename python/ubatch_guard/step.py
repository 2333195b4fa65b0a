"""What a step is: KV cache groups, requests, cuts and verdicts. Plain frozen data, no torch, no engine.

Token *offsets* run over the step's scheduled tokens in batch order. A *cut* K puts the offsets below K in
the earlier microbatch. A cut is *unsafe* when a token of the earlier microbatch reads a KV slot that a token
of the later one has still to write.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""Integer arrays as engines hold them: int32 or int64, any strides."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One KV cache group: the layers that share a block table.

    Column j of a block table row holds the token positions ``j * tokens_per_column`` up to, not including,
    ``(j + 1) * tokens_per_column``.

    Attributes:
        tokens_per_column: Tokens that one block-table column spans: the kernel's block size times the
            context-parallel world size.
        num_blocks: Size of the block pool; a block id is valid in ``0 .. num_blocks - 1``.
        sliding_window: A query at position p attends to ``p - sliding_window + 1 .. p``; None: to all.
        attention_chunk_size: Chunked local attention: a query at p attends from the start of its chunk,
            ``p // attention_chunk_size * attention_chunk_size``; None: to all. At most one of the two is set.
        prompt_in_view: Beside the window, a query attends to the whole prompt of its request, and to nothing
            in between (vLLM's ``RSWASpec``; ``sliding_window`` is its ``rswa_window``).
        null_block: Id of the block that holds no data (0 in vLLM), never a hazard; None: there is none.
    """

    tokens_per_column: int
    num_blocks: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    null_block: int | None = 0
    prompt_in_view: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One engine step, in batch order.

    Attributes:
        num_computed_tokens: int32 or int64, shape ``[num_reqs]``: tokens whose KV exists before the step, or
            is taken to exist because another request of the step computes it.
        num_scheduled_tokens: int32 or int64, shape ``[num_reqs]``: tokens the step runs.
        block_tables: One array per group, int32 or int64, shape ``[>= num_reqs, columns]``; row r belongs to
            the r-th request of the batch. Columns past a row's tokens are never looked at.
        groups: The KV cache groups, one per block table.
        num_settled_tokens: int32 or int64, shape ``[num_reqs]``, or None (all zero): the leading positions
            whose KV an *earlier* step is known to have written; reading them is no hazard. For a request that
            ran before this is ``num_computed_tokens``, unless a failed KV load made the engine count on
            another request to write them again.
        num_read_tokens: int32 or int64, shape ``[num_reqs]``, or None (``num_computed_tokens``): the leading
            positions that a request reads and does not write, at least those computed. They are more for a
            request that runs some cached positions again because another group keeps fewer (vLLM's bounded
            replay, ``NewRequestData.replay_start``: computed is hit - window, read is hit). It is taken to
            read all of them from its first token on, but none beyond its own tokens.
        num_prompt_tokens: int32 or int64, shape ``[num_reqs]``, or None: the leading positions that are the
            prompt, for groups with ``prompt_in_view``. None: all positions are taken for prompt, which finds
            every hazard and may find some that are none.
    """

    num_computed_tokens: IntArray
    num_scheduled_tokens: IntArray
    block_tables: Sequence[IntArray]
    groups: Sequence[KVCacheGroup]
    num_settled_tokens: IntArray | None = None
    num_read_tokens: IntArray | None = None
    num_prompt_tokens: IntArray | None = None

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.num_scheduled_tokens)

    @property
    def num_tokens(self) -> int:
        """Scheduled tokens of the whole step."""
        return int(np.sum(np.asarray(self.num_scheduled_tokens)))

    def permuted(self, order: Sequence[int]) -> Step:
        """The same step with the request at position ``order[i]`` moved to position i."""
        index = np.asarray(order, dtype=np.intp)

        def moved(counts: IntArray | None) -> IntArray | None:
            return None if counts is None else counts[index]

        return Step(
            num_computed_tokens=self.num_computed_tokens[index],
            num_scheduled_tokens=self.num_scheduled_tokens[index],
            block_tables=tuple(table[index] for table in self.block_tables),
            groups=self.groups,
            num_settled_tokens=moved(self.num_settled_tokens),
            num_read_tokens=moved(self.num_read_tokens),
            num_prompt_tokens=moved(self.num_prompt_tokens),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MirroredStep:
    """One engine step, in batch order, whose block tables are in a mirror.

    Attributes:
        slots: int32, shape ``[num_reqs]``: the requests' handles, from ``Mirror.slots``. -1 is a request
            without a row there: it holds no block that another request of the step holds.
        num_computed_tokens: As in `Step`.
        num_scheduled_tokens: As in `Step`.
        num_read_tokens: As in `Step`.
        num_prompt_tokens: As in `Step`.
    """

    slots: npt.NDArray[np.int32]
    num_computed_tokens: IntArray
    num_scheduled_tokens: IntArray
    num_read_tokens: IntArray | None = None
    num_prompt_tokens: IntArray | None = None

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.num_scheduled_tokens)

    @property
    def num_tokens(self) -> int:
        """Scheduled tokens of the whole step."""
        return int(np.sum(np.asarray(self.num_scheduled_tokens)))


@dataclass(frozen=True, slots=True, order=True)
class CutRange:
    """The cuts ``first`` to ``last``, both included, in tokens; empty when ``first > last``."""

    first: int
    last: int

    def __contains__(self, cut: int) -> bool:
        return self.first <= cut <= self.last

    def __len__(self) -> int:
        return max(0, self.last - self.first + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))


@dataclass(frozen=True, slots=True)
class UnsafeCuts:
    """A maximal range of unsafe cuts, and who makes its first cut unsafe.

    Attributes:
        first: First unsafe cut, in tokens.
        last: Last unsafe cut, in tokens.
        reader: Batch position of the culprit that reads.
        writer: Batch position of the culprit that writes what ``reader`` reads.
        group: Index of the KV cache group.
        block: Id of the block both hold: the one written last among those ``reader`` reads.
    """

    first: int
    last: int
    reader: int
    writer: int
    group: int
    block: int

    def __contains__(self, cut: int) -> bool:
        return self.first <= cut <= self.last


class Phase(enum.IntEnum):
    """Where an attention backend wants a request in the batch; lower phases lead."""

    DECODE = 0
    EXTEND = 1
    PREFILL = 2


class OrderConstraint(enum.Enum):
    """Which batch orders the attention backends of a runner accept."""

    FREE = "free"
    """Any order."""
    DECODES_LEAD = "decodes_lead"
    """Decodes first, then extends and prefills in any order (vLLM's ``split_decodes_and_prefills``)."""
    DECODE_EXTEND_PREFILL = "decode_extend_prefill"
    """Three sections (vLLM's ``split_decodes_prefills_and_extends``)."""
    FIXED = "fixed"
    """The order the batch has; no request may move."""


@dataclass(frozen=True, slots=True)
class Order:
    """A batch order with every writer before its readers.

    Attributes:
        permutation: ``permutation[i]`` is the present batch position of the request that goes to position i.
        swaps: The same as swaps of two batch positions, applied one after the other
            (vLLM: ``input_batch.swap_states(i, j)``); empty when no request moves.
        demoted: Present batch positions, ascending, of the short requests that stand before the first longer
            query now and behind a longer one in this order; empty where no length was said to be short.
            Backends whose decodes end at the first longer query (vLLM's ``split_decodes_and_prefills``) run
            them as prefills.
    """

    permutation: tuple[int, ...]
    swaps: tuple[tuple[int, int], ...]
    demoted: tuple[int, ...] = ()

    def num_demoted_tokens(self, num_computed_tokens: IntArray, num_scheduled_tokens: IntArray) -> int:
        """Tokens that the demoted requests have when the step is done; both arrays in the present order."""
        return sum(int(num_computed_tokens[who]) + int(num_scheduled_tokens[who]) for who in self.demoted)


class Policy(enum.Enum):
    """What a guard does about a step with an unsafe cut."""

    OBSERVE = "observe"
    """Count it and let it through."""
    VETO = "veto"
    """Run it whole."""
    REORDER = "reorder"
    """Reorder the batch so that no cut is unsafe; where no order helps, run it whole."""


class Reason(enum.Enum):
    """Why a verdict is what it is."""

    SAFE = "safe"
    """No cut that was asked about is unsafe."""
    REORDERED = "reordered"
    """Some cut was unsafe; in ``Verdict.order`` none is."""
    OBSERVED = "observed"
    """Some cut is unsafe, and the policy only observes."""
    UNSAFE = "unsafe"
    """Some cut is unsafe and the policy does not reorder, or the backends fix the order."""
    NO_ORDER = "no_order"
    """Some cut is unsafe and no batch order helps (a cycle, or the order constraint forbids it)."""
    DEMOTES = "demotes"
    """Some cut is unsafe, and every order makes prefills of short requests with more tokens than may be."""
    UNDECIDED = "undecided"
    """The step could not be decided; ``Verdict.error`` says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with a step.

    Attributes:
        allow: The step may be cut (in ``order``, when there is one) at any cut that was asked about.
        reason: Why.
        unsafe: The unsafe cuts of the step in its present order, as far as they were asked about.
        order: The order to run the batch in, or None: leave it.
        error: What kept the guard from deciding, when ``reason`` is ``UNDECIDED``.
    """

    allow: bool
    reason: Reason
    unsafe: tuple[UnsafeCuts, ...] = ()
    order: Order | None = None
    error: str | None = None


def feasible_cuts(num_tokens: int, num_ubatches: int = 2, num_tokens_padded: int | None = None) -> CutRange:
    """The cuts that a rank's step can get in a vote that it does not know the outcome of.

    vLLM cuts at multiples of ``padded // num_ubatches``, where ``padded`` is the maximum over the ranks'
    padded token counts, and only if this leaves tokens for the last microbatch. So every cut of a rank lies
    in ``own_padded // num_ubatches .. num_tokens - 1``.

    Args:
        num_tokens: Scheduled tokens of the step on this rank.
        num_ubatches: Microbatches, at least 2.
        num_tokens_padded: This rank's padded token count; None: ``num_tokens``.

    Raises:
        ValueError: ``num_ubatches`` below 2, or ``num_tokens_padded`` below ``num_tokens``.
    """
    padded = num_tokens if num_tokens_padded is None else num_tokens_padded
    if num_ubatches < 2:
        raise ValueError(f"num_ubatches is {num_ubatches}; a split has at least 2 microbatches")
    if padded < num_tokens:
        raise ValueError(f"num_tokens_padded {padded} is below num_tokens {num_tokens}")
    return CutRange(max(1, padded // num_ubatches), num_tokens - 1)
