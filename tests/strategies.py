"""Random steps, small enough for the slot-by-slot oracle and odd enough to be worth asking."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from ubatch_guard.step import KVCacheGroup, Phase, Step

DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


@st.composite
def groups(draw: st.DrawFn) -> KVCacheGroup:
    window = chunk = None
    locality = draw(st.sampled_from(["full", "full", "window", "chunk"]))
    if locality == "window":
        window = draw(st.integers(1, 12))
    elif locality == "chunk":
        chunk = draw(st.integers(1, 12))
    return KVCacheGroup(
        tokens_per_column=draw(st.integers(1, 6)),
        num_blocks=draw(st.integers(1, 12)),
        sliding_window=window,
        attention_chunk_size=chunk,
        null_block=draw(st.sampled_from([0, 0, None, 3])),
        prompt_in_view=locality == "window" and draw(st.booleans()),
    )


def _laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """The same values with other strides."""
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "every other":
        spread = np.full(tuple(2 * n for n in array.shape), -7, dtype=array.dtype)
        view = spread[tuple(slice(None, None, 2) for _ in array.shape)]
        view[...] = array
        return view
    if layout == "backwards":
        index = tuple(slice(None, None, -1) for _ in array.shape)
        return np.ascontiguousarray(array[index])[index]
    return array


layouts = st.sampled_from(["plain", "fortran", "every other", "backwards"])


@st.composite
def steps(draw: st.DrawFn, *, max_reqs: int = 6, plausible: bool | None = None) -> Step:
    """A step.

    ``plausible`` steps are what a prefix-caching scheduler makes: a request shares the leading blocks of one
    admitted before it and has the rest to itself. The others have any block anywhere: cycles, two writers of
    one slot, a block twice in a row.
    """
    if plausible is None:
        plausible = draw(st.booleans())
    num_reqs = draw(st.integers(0 if not plausible else 1, max_reqs))
    kinds = draw(st.lists(groups(), min_size=1, max_size=3))
    computed = draw(st.lists(st.integers(0, 14), min_size=num_reqs, max_size=num_reqs))
    scheduled = draw(st.lists(st.integers(0, 9), min_size=num_reqs, max_size=num_reqs))
    tables = []
    final_kinds = []
    for kind in kinds:
        needed = [-(-(c + q) // kind.tokens_per_column) for c, q in zip(computed, scheduled, strict=True)]
        width = max(needed, default=0) + draw(st.integers(0, 2))
        dtype = draw(st.sampled_from(DTYPES))
        if plausible:
            table, num_blocks = _shared_prefixes(draw, needed, width)
            kind = replace(kind, num_blocks=num_blocks, null_block=0)
        else:
            ids = st.integers(0, kind.num_blocks - 1)
            table = [draw(st.lists(ids, min_size=width, max_size=width)) for _ in range(num_reqs)]
        array = np.array(table, dtype=dtype).reshape(num_reqs, width)
        for row, columns in enumerate(needed):
            # Columns past a row's tokens hold rubbish, which nobody may look at.
            array[row, columns:] = draw(st.sampled_from([0, -1, np.iinfo(dtype).max, 1]))
        tables.append(_laid_out(array, draw(layouts)))
        final_kinds.append(kind)
    settled = None
    if draw(st.booleans()):
        settled = draw(st.lists(st.integers(0, 16), min_size=num_reqs, max_size=num_reqs))
    read = None
    if draw(st.booleans()):
        read = [c + draw(st.sampled_from([0, 0, 1, 2, 5, 12])) for c in computed]
    prompt = None
    if draw(st.booleans()):
        prompt = draw(st.lists(st.integers(0, 14), min_size=num_reqs, max_size=num_reqs))
    return Step(
        num_computed_tokens=_counts(draw, computed),
        num_scheduled_tokens=_counts(draw, scheduled),
        block_tables=tuple(tables),
        groups=tuple(final_kinds),
        num_settled_tokens=None if settled is None else _counts(draw, settled),
        num_read_tokens=None if read is None else _counts(draw, read),
        num_prompt_tokens=None if prompt is None else _counts(draw, prompt),
    )


def _counts(draw: st.DrawFn, values: list[int]) -> np.ndarray:
    return _laid_out(np.array(values, dtype=draw(st.sampled_from(DTYPES))), draw(layouts))


def _shared_prefixes(draw: st.DrawFn, needed: list[int], width: int) -> tuple[list[list[int]], int]:
    """Rows in which each request, in an order of admission, takes leading blocks from an earlier one."""
    rows: dict[int, list[int]] = {}
    next_block = 1
    for position in draw(st.permutations(range(len(needed)))):
        row: list[int] = []
        if rows:
            donor = rows[draw(st.sampled_from(sorted(rows)))]
            row = donor[: draw(st.integers(0, min(needed[position], len(donor))))]
        while len(row) < needed[position]:
            row = [*row, 0 if draw(st.integers(0, 9)) == 0 else next_block]
            next_block += 1
        rows[position] = row
    return [rows[p] + [0] * (width - len(rows[p])) for p in range(len(needed))], next_block


def phases(num_reqs: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from([int(p) for p in Phase]), min_size=num_reqs, max_size=num_reqs)
