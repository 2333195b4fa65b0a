"""The check at the cut against the slot-by-slot oracle: it finds a read of a later write where one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from strategies import steps

from ubatch_guard.step import Step
from ubatch_guard.vllm import cut_check


class Cut(NamedTuple):
    """A step that is being cut, as a runner has it.

    Attributes:
        step: The step.
        cuts: Where, in tokens, ascending.
        block_sizes: Per group, tokens in a block of the table that kernels are given.
        null_slots: Tokens whose block is the null block have a slot in it; otherwise a negative one.
    """

    step: Step
    cuts: list[int]
    block_sizes: list[int]
    null_slots: bool

    def check(self) -> cut_check.Finding | None:
        step = self.step
        ends = np.cumsum(step.num_scheduled_tokens, dtype=np.int32)
        groups = []
        for place, size in enumerate(self.block_sizes):
            parts = step.groups[place].tokens_per_column // size
            table = step.block_tables[place].astype(np.int64)[..., None] * parts + np.arange(parts)
            table = table.reshape(step.num_reqs, step.block_tables[place].shape[1] * parts)
            slots = [
                self._slot(place, int(table[request, position // size]), position)
                for request, position in oracle.tokens(step)
            ]
            groups.append((step.groups[place], size, table, np.array(slots, dtype=np.int64)))
        return cut_check.first_read_of_a_later_write(
            np.concatenate([[0], ends]),
            np.asarray(step.num_computed_tokens + step.num_scheduled_tokens),
            self.cuts,
            groups,
        )

    def _slot(self, place: int, block: int, position: int) -> int:
        size, group = self.block_sizes[place], self.step.groups[place]
        is_null = block * size // group.tokens_per_column == group.null_block
        return -1 if is_null and not self.null_slots else block * size + position % size

    def wrong(self) -> set[tuple[int, int, int, int, int]]:
        """Group, cut, reader, writer and block of every read of a later write, by the oracle."""
        step = self.step
        written = oracle.writes(step)
        reads = oracle.reads(step)
        # Beside its prefix, a token reads what it writes itself.
        for slot, writes in written.items():
            reads += [oracle.Read(write.offset, write.request, slot) for write in writes]
        return {
            (read.slot[0], cut, read.request, write.request, read.slot[1])
            for read in reads
            for write in written.get(read.slot, ())
            for cut in self.cuts
            if read.offset < cut <= write.offset
        }


@st.composite
def cut_steps(draw: st.DrawFn, *, plausible: bool | None = None) -> Cut:
    step = draw(steps(plausible=plausible))
    step = replace(
        step,
        groups=tuple(replace(group, prompt_in_view=False) for group in step.groups),
        num_settled_tokens=None,
        num_read_tokens=None,
        num_prompt_tokens=None,
    )
    cuts = draw(st.lists(st.integers(1, max(1, step.num_tokens)), min_size=1, max_size=2, unique=True))
    sizes = [
        draw(st.sampled_from([n for n in range(1, span + 1) if span % n == 0]))
        for span in (group.tokens_per_column for group in step.groups)
    ]
    return Cut(step, sorted(cuts), sizes, draw(st.booleans()))


def agrees(cut: Cut) -> None:
    """The check finds something just where the oracle does, and what it says of it is so."""
    wrong, found = cut.wrong(), cut.check()
    assert (found is not None) is bool(wrong), (found, wrong)
    if found is not None:
        place, at, reader, writer, block = found
        group = cut.step.groups[place]
        column_block = block * cut.block_sizes[place] // group.tokens_per_column
        assert (place, at, reader, writer, column_block) in wrong


@settings(max_examples=300)
@given(cut_steps())
def test_the_check_finds_what_the_oracle_finds(cut: Cut) -> None:
    agrees(cut)


@settings(max_examples=150)
@given(cut_steps(plausible=True))
def test_in_a_step_of_a_prefix_cache_a_finding_is_an_unsafe_cut(cut: Cut) -> None:
    """And the other way round, where no two requests write one slot."""
    written = oracle.writes(cut.step)
    if any(len(writes) > 1 for writes in written.values()):
        return
    unsafe = oracle.unsafe_cuts(cut.step)
    assert (cut.check() is not None) is any(at in unsafe for at in cut.cuts)


def _no_locality(*_: Any) -> int:
    return 0


def _without_first_column(block_table: Any, blocks: Any, readers: Any) -> Any:
    return [hit for hit in _rows_with(block_table, blocks, readers) if hit[1]]


_rows_with = cut_check._rows_with
_first_read_of_a_later_write = cut_check.first_read_of_a_later_write


def _first_cut_alone(starts: Any, lens: Any, cuts: Any, groups: Any) -> Any:
    return _first_read_of_a_later_write(starts, lens, cuts[:1], groups)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("first_read_of_a_later_write", lambda *_: None),
        ("first_read_of_a_later_write", _first_cut_alone),
        ("_first_read", _no_locality),
        ("_rows_with", _without_first_column),
    ],
    ids=["finds nothing", "first cut alone", "no windows", "not the first column"],
)
def test_a_wrong_check_is_found(
    name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control, made the same in every run."""
    monkeypatch.setattr(cut_check, name, wrong)

    @settings(
        max_examples=5000,
        phases=[Phase.generate],
        derandomize=True,
        report_multiple_bugs=False,
        database=None,
    )
    @given(cut_steps())
    def fails(cut: Cut) -> None:
        agrees(cut)

    with pytest.raises(AssertionError):
        fails()


def test_it_does_find_reads() -> None:
    """Of the examples of the property, enough have a finding and enough have none."""
    outcomes = {True: 0, False: 0}

    @settings(max_examples=200, phases=[Phase.generate], derandomize=True, database=None)
    @given(cut_steps())
    def count(cut: Cut) -> None:
        outcomes[cut.check() is not None] += 1

    count()
    assert min(outcomes.values()) > 20, outcomes
