"""The benchmark cases as data, for ``ubatch-guard bench`` and the asv suite alike.

No two rows share a block, so no rule can stop early at a hit: a case is what a busy, safe step costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ubatch_guard.step import CutRange, KVCacheGroup, Step, feasible_cuts

SHUFFLED = "-shuffled"
"""Suffix of the name of a case whose pool has been in use for long."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step by its numbers; the batch order is decodes, readers, writers.

    Attributes:
        name: What it is called in tables.
        decodes: Requests that run one token at half the context.
        readers: Requests that hit the whole context in the prefix cache and run ``suffix`` tokens more.
        context: Tokens; a multiple of ``block``.
        writers: Requests that run the first ``tokens`` tokens of their prompts.
        tokens: Tokens that each writer runs.
        suffix: Tokens that each reader runs.
        block: Tokens a block.
        shuffled: A fresh pool hands out ids in sequence, request by request. A pool that has served for long
            hands out what came back to it, in no order.
    """

    name: str
    decodes: int
    readers: int
    context: int
    writers: int
    tokens: int
    suffix: int = 64
    block: int = 16
    shuffled: bool = False

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return self.decodes + self.readers + self.writers

    def shuffle(self) -> Case:
        """The same step in a pool that has been in use for long."""
        return replace(self, name=self.name + SHUFFLED, shuffled=True)

    def step(self) -> Step:
        """The step as vLLM holds it: int32 arrays, rows padded with zeros to the longest."""
        kinds = [self.decodes, self.readers, self.writers]
        computed = np.repeat([self.context // 2, self.context, 0], kinds).astype(np.int32)
        scheduled = np.repeat([1, self.suffix, self.tokens], kinds).astype(np.int32)
        # What decodes read, earlier steps wrote. The readers' prefixes may be written in this very step.
        settled = np.repeat([self.context // 2, 0, 0], kinds).astype(np.int32)

        lengths = -(-(computed + scheduled) // self.block)
        num_blocks = int(lengths.sum()) + 1
        pool: npt.NDArray[np.int32] = np.arange(1, num_blocks, dtype=np.int32)
        if self.shuffled:
            np.random.default_rng(0).shuffle(pool)
        table = np.zeros((self.num_reqs, int(lengths.max())), dtype=np.int32)
        table[np.arange(table.shape[1]) < lengths[:, None]] = pool
        return Step(computed, scheduled, (table,), (KVCacheGroup(self.block, num_blocks),), settled)


CASES = (
    Case("gsm8k", decodes=0, readers=7, context=672, writers=1, tokens=730),
    Case("decode256", decodes=256, readers=0, context=4096, writers=0, tokens=0),
    Case("mixed256", decodes=224, readers=24, context=8192, writers=8, tokens=2048),
    Case("long1024", decodes=896, readers=64, context=131072, writers=64, tokens=512),
    Case("rag512", decodes=256, readers=250, context=32768, writers=6, tokens=4096),
)
"""The five by which the guard is judged."""

DECODE_THRESHOLD = 1
"""``reorder_batch_threshold`` of the numpy rule in these cases: a request with one token is a decode."""

CONTEXTS = (1 << 10, 1 << 13, 1 << 16, 1 << 20)
"""Context lengths, in tokens, over which cost is followed at equal work."""

REQUESTS = (8, 64, 512, 4096)
"""Batch sizes over which cost is followed."""


def of_context(context: int) -> Case:
    """A mixed step of 26 requests that runs and writes the same whatever the context."""
    return Case(f"context-{context}", decodes=16, readers=8, context=context, writers=2, tokens=2048)


def hit_of_context(context: int) -> Step:
    """The same with a hazard: the first reader's last whole block is one that the last writer writes."""
    case = of_context(context)
    step = case.step()
    (table,) = step.block_tables
    table[case.decodes, context // case.block - 1] = table[-1, 100]
    return step


def of_requests(num_reqs: int) -> Case:
    """A mixed step of that many requests: a writer and a reader to six decodes."""
    part = num_reqs // 8
    return Case(f"requests-{num_reqs}", 6 * part, part, context=8192, writers=part, tokens=512)


def by_name(name: str) -> Case:
    """The case of that name: one of the five, ``-shuffled`` or not, ``context-1024``, ``requests-8``."""
    kind, _, number = name.partition("-")
    if kind in ("context", "requests"):
        return (of_context if kind == "context" else of_requests)(int(number))
    case = {case.name: case for case in CASES}[name.removesuffix(SHUFFLED)]
    return case.shuffle() if name.endswith(SHUFFLED) else case


def burst(prompts: int, copies: int = 8) -> Step:
    """The hazard itself: each of some prompts of 730 tokens arrives ``copies`` times in one step.

    The first of each computes its 730 tokens; the others hit its 45 whole blocks and run the last 10 tokens.
    The batch has the readers first, as an engine does that puts what is longest last.
    """
    group = KVCacheGroup(16, num_blocks=1 + prompts * (46 + copies - 1))
    own = np.arange(1, group.num_blocks, dtype=np.int32).reshape(prompts, -1)
    writers = own[:, :46]
    readers = np.repeat(writers, copies - 1, axis=0)
    readers[:, 45] = own[:, 46:].reshape(-1)
    kinds = [prompts * (copies - 1), prompts]
    return Step(
        num_computed_tokens=np.repeat([720, 0], kinds).astype(np.int32),
        num_scheduled_tokens=np.repeat([10, 730], kinds).astype(np.int32),
        block_tables=(np.concatenate([readers, writers]),),
        groups=(group,),
    )


def cuts_of(step: Step) -> CutRange:
    """What is asked of every case: the cuts that the step can get in a vote."""
    return feasible_cuts(step.num_tokens)


def step_by_name(name: str) -> Step:
    """The step of a case, or ``burst-8``: as many prompts, each eight times."""
    kind, _, number = name.partition("-")
    return burst(int(number)) if kind == "burst" else by_name(name).step()


def rows_of(step: Step) -> Iterator[list[npt.NDArray[np.int32]]]:
    """The block ids that each request of a step needs, per group, as an engine would hand them out."""
    ends = step.num_computed_tokens + step.num_scheduled_tokens
    for position, end in enumerate(ends.tolist()):
        yield [
            np.asarray(table[position, : -(-end // group.tokens_per_column)], dtype=np.int32)
            for group, table in zip(step.groups, step.block_tables, strict=True)
        ]
