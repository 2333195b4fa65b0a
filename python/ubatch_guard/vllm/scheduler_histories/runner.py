"""A model runner without a model: rows, slots and tokens are kept as the real one does.

The next token is a function of the prefix, so requests with the same prefix answer alike, and what was
generated is hit as well as prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ubatch_guard.vllm.scheduler_histories.orders import new_request_ids
from ubatch_guard.vllm.scheduler_histories.slots import (
    Reads,
    Row,
    Slot,
    SlotContents,
    prefix_key,
    prefix_keys,
)


@dataclass(slots=True)
class Step:
    """What a step does.

    Attributes:
        reads: What its requests read.
        new: New and resumed requests.
        sampled: The tokens that each request samples, accepted drafts first.
        lost_blocks: Blocks whose load failed.
        num_set_back: Running requests whose count of computed tokens was lowered.
        written_twice: Slots that two requests write.
    """

    reads: Reads
    new: set[str]
    sampled: dict[str, list[int]]
    lost_blocks: set[int]
    num_set_back: int
    written_twice: list[Slot]


class MadeUpRunner:
    """Executes scheduler outputs in their order.

    Args:
        contents: The slots of its KV cache.
        rng: Decides which drafts are good, and which loads fail.
        vocabulary: Number of tokens there are.
        drafts_come_late: The scheduler sends placeholders for drafts and takes counts for granted
            (asynchronous scheduling).
    """

    def __init__(
        self, contents: SlotContents, rng: random.Random, vocabulary: int, drafts_come_late: bool
    ) -> None:
        self.contents = contents
        self.rows: dict[str, Row] = {}
        self._rng = rng
        self._vocabulary = vocabulary
        self._drafts_come_late = drafts_come_late

    def execute(
        self, scheduler_output: Any, requests: dict[str, Any], loads: Iterable[Any], loads_may_fail: bool
    ) -> Step:
        """Take in the scheduler's changes, load, read, write and sample.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput``.
            requests: The scheduler's requests, asked for the tokens of one that is set back or resumed.
            loads: Loads (`connector.Load`) that the step begins with.
            loads_may_fail: Whether half of them lose some of their blocks.
        """
        num_set_back = self._update_rows(scheduler_output, requests)
        lost_blocks: set[int] = set()
        for load in loads:
            lost_blocks |= self.load(load, loads_may_fail and self._rng.random() < 0.5)
        rows = {request: self.rows[request] for request in scheduler_output.num_scheduled_tokens}
        new = new_request_ids(scheduler_output)
        writes: dict[Slot, tuple[str, int | None]] = {}
        written_twice, sampled, num_written = [], {}, {}
        for request, row in rows.items():
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request, [])
            num_tokens = scheduler_output.num_scheduled_tokens[request]
            keys, sampled[request] = self._compute(row, num_tokens, drafts, padded=request in new)
            num_written[request] = num_tokens - len(drafts) + max(0, len(sampled[request]) - 1)
            for position, key in enumerate(keys, row.num_computed_tokens):
                for slot in self.contents.slots(row, position):
                    if slot[1] == 0:
                        raise AssertionError(f"{request} writes position {position} into the null block")
                    if writes.get(slot, (request,))[0] != request:
                        written_twice.append(slot)
                    writes[slot] = (request, key)
        reads = self.contents.reads(rows, writes)
        for slot, (_, key) in writes.items():
            self.contents.write(slot, key)
        for request, row in rows.items():
            row.num_computed_tokens += num_written[request]
            row.tokens += sampled[request]
        return Step(reads, new, sampled, lost_blocks, num_set_back, written_twice)

    def load(self, load: Any, fails: bool = False) -> set[int]:
        """Fill the slots of a load; if it ``fails``, from a random block on with nothing, and say which."""
        block_size = self.contents.block_size
        end = load.end
        if fails:
            end = self._rng.randrange(load.start // block_size, load.end // block_size) * block_size
        row, keys, lost = Row(load.tokens, 0, load.block_ids), prefix_keys(load.tokens), set()
        for position in range(load.start, load.end):
            for slot in self.contents.slots(row, position):
                if slot[1] != 0:  # blocks before a sliding window are the null block
                    self.contents.write(slot, keys[position] if position < end else None)
                    if position >= end:
                        lost.add(slot[1])
        return lost

    def draft(self, request: str, num_drafts: int) -> list[int]:
        """Drafts behind the last token, of which some are good."""
        key, drafts = self.rows[request].keys()[-1], []
        for _ in range(num_drafts):
            drafts.append(self._guess(key))
            key = prefix_key(key, drafts[-1])
        return drafts

    def _update_rows(self, scheduler_output: Any, requests: dict[str, Any]) -> int:
        for request in {*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())}:
            self.rows.pop(request, None)
        for new in scheduler_output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or requests[new.req_id].all_token_ids
            self.rows[new.req_id] = Row(
                list(tokens), new.num_computed_tokens, [list(ids) for ids in new.block_ids]
            )
        num_set_back = 0
        cached = scheduler_output.scheduled_cached_reqs
        # Releases before 0.34 send a resumed request so, if Model Runner V1 is to take it.
        resumed = getattr(cached, "resumed_req_ids", ())
        for request, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request in resumed:
                tokens = requests[request].all_token_ids
                self.rows[request] = Row(list(tokens), computed, [list(ids) for ids in block_ids])
                continue
            row = self.rows[request]
            for mine, added in zip(row.block_ids, block_ids or (), strict=False):
                mine.extend(added)
            if computed != row.num_computed_tokens and not self._drafts_come_late:
                self.rows[request] = Row(list(requests[request].all_token_ids), computed, row.block_ids)
                num_set_back += 1
        return num_set_back

    def _compute(
        self, row: Row, num_tokens: int, drafts: list[int], *, padded: bool
    ) -> tuple[list[int | None], list[int]]:
        """The keys that the request writes from its first position on, and what it samples."""
        num_known = num_tokens - len(drafts)
        end = row.num_computed_tokens + num_known
        if end > len(row.tokens):
            raise AssertionError(
                f"{num_known} tokens from {row.num_computed_tokens} on: {len(row.tokens)} are known"
            )
        keys: list[int | None] = list(row.keys()[row.num_computed_tokens : end])
        if end < len(row.tokens):
            if drafts:
                raise AssertionError("drafts before the end of a prefill")
            return keys, []
        key, sampled = row.keys()[-1], []
        for draft in drafts:
            if self._drafts_come_late:
                draft = -1 if padded else self._guess(key)
            if draft != self._next_token(key):
                break
            sampled.append(draft)
            key = prefix_key(key, draft)
            keys.append(key)
        # Slots of refused drafts are right for nobody.
        keys += [None] * (num_tokens - len(keys))
        return keys, [*sampled, self._next_token(key)]

    def _next_token(self, key: int) -> int:
        return (key >> 7) % self._vocabulary

    def _guess(self, key: int) -> int:
        return self._next_token(key) if self._rng.random() < 0.6 else self._rng.randrange(self._vocabulary)
