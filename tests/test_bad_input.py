"""Bad input to the core: a typed exception with the value in it, never a panic, never an answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ubatch_guard import (
    BlockIdError,
    BusyError,
    DtypeError,
    DuplicateRequestError,
    GroupError,
    Guard,
    GuardError,
    KVCacheGroup,
    Mirror,
    ShapeError,
    Step,
    TokenCountError,
    UnknownRequestError,
)
from ubatch_guard._core import Checker

GROUP = KVCacheGroup(tokens_per_column=16, num_blocks=64)
TABLE = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
COMPUTED = np.array([16, 0], np.int32)
SCHEDULED = np.array([16, 48], np.int32)


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (KVCacheGroup(0, 64), "tokens_per_column is 0"),
        (KVCacheGroup(-16, 64), "tokens_per_column is -16"),
        (KVCacheGroup(16, 0), "num_blocks is 0"),
        (KVCacheGroup(16, 2**31), "num_blocks is 2147483648"),
        (KVCacheGroup(16, 2**40), "num_blocks is 1099511627776"),
        (KVCacheGroup(16, 64, sliding_window=0), "sliding_window is 0"),
        (KVCacheGroup(16, 64, sliding_window=-1), "sliding_window is -1"),
        (KVCacheGroup(16, 64, attention_chunk_size=0), "attention_chunk_size is 0"),
        (KVCacheGroup(16, 64, sliding_window=8, attention_chunk_size=8), "both set"),
        (KVCacheGroup(16, 64, null_block=2**40), "1099511627776"),
        (KVCacheGroup(16.5, 64), "tokens_per_column is 16.5"),  # type: ignore[arg-type]
    ],
)
def test_groups(group: KVCacheGroup, text: str) -> None:
    for make in (Guard, Mirror, Checker):
        with pytest.raises(GroupError, match=text):
            make([group])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"table": TABLE.astype(np.int16)}, DtypeError, "int16"),
        ({"table": TABLE.astype(np.uint32)}, DtypeError, "uint32"),
        ({"table": TABLE.astype(np.float32)}, DtypeError, "float32"),
        ({"table": TABLE.astype(">i4")}, DtypeError, "expected a numpy array of int32 or int64"),
        ({"table": TABLE.tolist()}, DtypeError, "list"),
        ({"table": TABLE[0]}, ShapeError, "1 dimensions, expected 2"),
        ({"table": TABLE[:1]}, ShapeError, "length 1, expected 2"),
        ({"table": TABLE[:, :2]}, ShapeError, "the row of request 1 has 2 columns, its tokens need 3"),
        ({"table": np.where(TABLE == 5, -1, TABLE)}, BlockIdError, "request 1 has block -1 in column 1"),
        ({"table": np.where(TABLE == 1, -7, TABLE)}, BlockIdError, "request 0 has block -7 in column 0"),
        ({"table": np.where(TABLE == 1, 64, TABLE)}, BlockIdError, "block 64 .* ids are 0 to 63"),
        ({"table": np.where(TABLE == 1, 2**40, TABLE.astype(np.int64))}, BlockIdError, "1099511627776"),
        ({"computed": COMPUTED[:1]}, ShapeError, "num_computed_tokens: length 1, expected 2"),
        ({"computed": COMPUTED.astype(np.float64)}, DtypeError, "num_computed_tokens is float64"),
        ({"computed": COMPUTED.reshape(2, 1)}, ShapeError, "num_computed_tokens has 2 dimensions"),
        ({"computed": COMPUTED - 17}, TokenCountError, "num_computed_tokens.0. is -1"),
        ({"scheduled": SCHEDULED - 17}, TokenCountError, "num_scheduled_tokens.0. is -1"),
        ({"scheduled": np.array([2**31, 1])}, TokenCountError, "2147483648"),
        ({"computed": np.array([2**31 - 1, 0])}, TokenCountError, "2147483663"),
        ({"computed": np.array([2**63 - 1, 0])}, TokenCountError, "9223372036854775807"),
        ({"scheduled": np.array([2**30, 2**30])}, TokenCountError, "2147483648"),
        ({"settled": np.array([-1, 0])}, TokenCountError, "num_settled_tokens.0. is -1"),
        ({"read": np.array([4, 0])}, TokenCountError, "num_read_tokens.0. is 4, below its 16 computed"),
        ({"read": np.array([-1, 0])}, TokenCountError, "num_read_tokens.0. is -1"),
        ({"read": np.array([2**31, 0])}, TokenCountError, "2147483648"),
        ({"read": np.array([16])}, ShapeError, "num_read_tokens: length 1, expected 2"),
        ({"read": [16, 0]}, DtypeError, "num_read_tokens is <class 'list'>"),
        ({"settled": np.array([1])}, ShapeError, "num_settled_tokens: length 1, expected 2"),
    ],
)
def test_steps(change: dict[str, object], error: type[GuardError], text: str) -> None:
    parts = {
        "table": TABLE,
        "computed": COMPUTED,
        "scheduled": SCHEDULED,
        "settled": None,
        "read": None,
    } | change
    step = Step(
        parts["computed"],  # type: ignore[arg-type]
        parts["scheduled"],  # type: ignore[arg-type]
        (parts["table"],),  # type: ignore[arg-type]
        (GROUP,),
        parts["settled"],  # type: ignore[arg-type]
        parts["read"],  # type: ignore[arg-type]
    )
    guard = Guard([GROUP])
    for question in (guard.unsafe_cuts, guard.order):
        with pytest.raises(error, match=text):
            question(step)
    good = Step(COMPUTED, SCHEDULED, (TABLE,), (GROUP,))
    assert guard.unsafe_cuts(good) == (), "an error leaves nothing behind"


def test_a_table_for_each_group() -> None:
    step = Step(COMPUTED, SCHEDULED, (TABLE, TABLE), (GROUP,))
    with pytest.raises(ShapeError, match="block_tables: length 2, expected 1"):
        Guard([GROUP]).unsafe_cuts(step)


def test_columns_past_the_tokens_are_not_looked_at() -> None:
    table = np.full((2, 5), -1, np.int64)
    table[:, :3] = TABLE
    assert Guard([GROUP]).unsafe_cuts(Step(COMPUTED, SCHEDULED, (table,), (GROUP,))) == ()


def test_views_that_are_no_plain_arrays() -> None:
    # A field of a structured array: its strides are no multiples of the element size.
    records = np.zeros((2, 3), np.dtype([("skip", np.int8), ("block", np.int32)]))
    records["block"] = np.array([[1, 2, 3], [1, 5, 6]])
    guard = Guard([GROUP])
    found = guard.unsafe_cuts(Step(COMPUTED, SCHEDULED, (records["block"],), (GROUP,)))
    assert [(cuts.first, cuts.last, cuts.block) for cuts in found] == [(1, 31, 1)]
    plain = np.array([[1, 2, 3], [1, 5, 6]])
    for view in (plain[::-1][::-1], np.asfortranarray(plain), np.repeat(plain, 2, axis=1)[:, ::2]):
        assert guard.unsafe_cuts(Step(COMPUTED, SCHEDULED, (view,), (GROUP,))) == found
    strided = Step(np.repeat(COMPUTED, 2)[::2], np.repeat(SCHEDULED, 2)[::2], (plain,), (GROUP,))
    assert guard.unsafe_cuts(strided) == found
    read_only = plain.copy()
    read_only.flags.writeable = False
    assert guard.unsafe_cuts(Step(COMPUTED, SCHEDULED, (read_only,), (GROUP,))) == found
    assert guard.unsafe_cuts(Step(COMPUTED[:0], SCHEDULED[:0], (plain[:0],), (GROUP,))) == ()


class _Index:
    """An integer in the sense of ``__index__``, which does something on the way."""

    def __init__(self, value: int, on_index: object = None) -> None:
        self.value = value
        self.on_index = on_index

    def __index__(self) -> int:
        if callable(self.on_index):
            self.on_index()
        return self.value


def test_ids_of_all_integer_kinds() -> None:
    mirror = Mirror([GROUP])
    rows = [1, np.int32(2), np.int64(3), True, _Index(5), type("Id", (int,), {})(6)]
    for kind in (list, tuple):
        mirror.add("r", [kind(rows)])
        assert mirror.row("r", 0).tolist() == [1, 2, 3, 1, 5, 6]
        mirror.free("r")
    for array in (np.array([1, 2], np.int32), np.array([1, 2]), np.array([1, 0, 2, 0])[::2]):
        mirror.add("r", [array])
        assert mirror.row("r", 0).tolist() == [1, 2]
        mirror.free("r")


def test_a_list_that_shrinks_while_it_is_read() -> None:
    ids: list[object] = [1, 2, 3]
    ids.insert(1, _Index(9, ids.clear))
    mirror = Mirror([GROUP])
    mirror.add("r", [ids])  # type: ignore[list-item]
    assert mirror.row("r", 0).tolist() == [1, 9]


@pytest.mark.parametrize(
    ("row", "error", "text"),
    [
        ([1, -1], BlockIdError, "block -1 as its new block 1"),
        ([64], BlockIdError, "block 64 as its new block 0; ids are 0 to 63"),
        ([2**31], BlockIdError, "2147483648"),
        ([2**70], BlockIdError, str(2**70)),
        ([-(2**70)], BlockIdError, str(2**70)),
        ([1.0], DtypeError, "1.0"),
        (["1"], DtypeError, "'1'"),
        ([None], DtypeError, "None"),
        (np.array([1.0]), DtypeError, "float64"),
        (np.array([[1]]), ShapeError, "2 dimensions"),
        (np.array([1, -1]), BlockIdError, "block -1"),
    ],
)
def test_bad_ids_change_nothing(row: object, error: type[GuardError], text: str) -> None:
    mirror = Mirror([GROUP, GROUP])
    mirror.add("known", [[1], [2]])
    for change in (mirror.append, mirror.replace):
        with pytest.raises(error, match=text):
            change("known", [[3], row])  # type: ignore[list-item]
    with pytest.raises(error, match=text):
        mirror.add("new", [[3], row])  # type: ignore[list-item]
    assert "new" not in mirror
    assert [mirror.row("known", group).tolist() for group in (0, 1)] == [[1], [2]]
    mirror.append("known", [[], [4]])
    assert [mirror.row("known", group).tolist() for group in (0, 1)] == [[1], [2, 4]]


def test_a_null_block_below_the_pool() -> None:
    group = KVCacheGroup(16, 64, null_block=-1)
    mirror = Mirror([group])
    mirror.add("reader", [[-1, 2, 3]])
    mirror.add("writer", [[-1, 2, 3]])
    counts = np.array([32, 0], np.int32), np.array([16, 48], np.int32)
    found = mirror.unsafe_cuts(mirror.slots(["reader", "writer"]), *counts)
    assert [cuts[5] for cuts in found] == [2]
    table = np.array([[-1, 2, 3]] * 2, np.int32)
    assert Checker([group]).unsafe_cuts([table], *counts) == found


def test_requests_known_and_unknown() -> None:
    mirror = Mirror([GROUP])
    mirror.add("r", [[1]])
    with pytest.raises(DuplicateRequestError, match="'r'"):
        mirror.add("r", [[2]])
    for change in (mirror.append, mirror.replace):
        with pytest.raises(UnknownRequestError, match="'s'"):
            change("s", [[2]])
    with pytest.raises(UnknownRequestError, match="'s'"):
        mirror.free("s")
    with pytest.raises(UnknownRequestError, match="'s'"):
        mirror.slots(["r", "s"])
    assert mirror.slots(["r", "s", "t"], missing=True).tolist() == [0, -1, -1]
    with pytest.raises(UnknownRequestError, match="'s'"):
        mirror.row("s", 0)
    one = np.array([1], np.int32)
    for slot in (1, -2, 2**31 - 1):
        with pytest.raises(UnknownRequestError, match=str(slot)):
            mirror.is_safe(np.array([slot], np.int32), one, one)
    slots = mirror.slots(["r"])
    two = np.array([1, 1], np.int32)
    with pytest.raises(DuplicateRequestError, match="slot 0 stands twice"):
        mirror.is_safe(np.repeat(slots, 2), two, two)
    with pytest.raises(ShapeError, match="slots: length 1, expected 2"):
        mirror.is_safe(slots, two, two)
    with pytest.raises(DtypeError, match="int64"):
        mirror.is_safe(slots.astype(np.int64), one, one)
    mirror.free("r")
    with pytest.raises(UnknownRequestError, match=r"slots.0. is 0"):
        mirror.is_safe(slots, one, one)


def test_rows_for_the_wrong_number_of_groups() -> None:
    mirror = Mirror([GROUP, GROUP])
    for rows in ([], [[1]], [[1], [2], [3]]):
        with pytest.raises(ShapeError, match="groups"):
            mirror.add("r", rows)
    with pytest.raises(ShapeError, match="rows: length 1, expected 2"):
        mirror.append_each(["r", "s"], [None])


def test_a_step_of_changes_is_taken_whole_or_not_at_all() -> None:
    mirror = Mirror([GROUP, GROUP])
    for name in "abc":
        mirror.add(name, [[1], [2]])
    good = [[3], [4, 5]]

    def interrupted() -> Iterator[int]:
        yield 3
        raise KeyboardInterrupt

    for wrong, error in (
        ([[3], [64]], BlockIdError),
        ([[3]], ShapeError),
        ([[3], ["4"]], DtypeError),
        (3, TypeError),
        ([[3], interrupted()], KeyboardInterrupt),
    ):
        with pytest.raises(error):
            mirror.append_each(["a", "b", "a", "c"], [good, None, good, wrong])  # type: ignore[list-item]
        with pytest.raises(UnknownRequestError):
            mirror.append_each(["a", "x"], [good, good])
        for name in "abc":
            assert [mirror.row(name, group).tolist() for group in (0, 1)] == [[1], [2]]
    mirror.append_each(["a", "c"], [good, good])
    assert [mirror.row(name, 0).tolist() for name in "abc"] == [[1, 3], [1], [1, 3]]


class _FailsLater:
    """A request id whose hash works so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __hash__(self) -> int:
        self.times -= 1
        if self.times < 0:
            raise KeyboardInterrupt
        return 7


def test_an_id_that_fails_leaves_no_row_behind() -> None:
    mirror = Mirror([GROUP])
    for times in range(2):
        with pytest.raises(KeyboardInterrupt):
            mirror.add(_FailsLater(times), [[1]])  # type: ignore[arg-type]
    mirror.add("r", [[1]])
    assert mirror.slots(["r"]).tolist() == [0], "the slot was vacant again"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_an_id_raises_passes(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    mirror = Mirror([GROUP])
    with pytest.raises(error):
        mirror.add("r", [[_Index(2, fail)]])  # type: ignore[list-item]
    assert "r" not in mirror


def test_an_object_in_use_says_so() -> None:
    mirror = Mirror([GROUP])
    mirror.add("r", [[1]])
    calls = [
        lambda: mirror.add("s", [[1]]),
        lambda: mirror.free("r"),
        lambda: mirror.clear(),
        lambda: mirror.slots(["r"]),
        lambda: mirror.row("r", 0),
        lambda: mirror.nbytes,
        lambda: len(mirror),
        lambda: "r" in mirror,
    ]
    for call in calls:
        with pytest.raises(BusyError, match="the Mirror is in use"):
            mirror.append("r", [[_Index(2, call)]])  # type: ignore[list-item]
    assert mirror.row("r", 0).tolist() == [1]
    checker = Checker([GROUP])

    class Tables:
        def __iter__(self) -> object:
            return iter([checker.is_safe((TABLE,), COMPUTED, SCHEDULED)])

    with pytest.raises(BusyError, match="the Checker is in use"):
        checker.is_safe(Tables(), COMPUTED, SCHEDULED)  # type: ignore[arg-type]
    assert checker.is_safe((TABLE,), COMPUTED, SCHEDULED)


def test_a_long_question_lets_other_threads_run() -> None:
    # Two threads with a guard each, on steps above the size from which a question lets go.
    row = np.arange(1 << 17, dtype=np.int32)
    step = Step(
        np.array([(1 << 21) - 16, 0], np.int32),
        np.array([16, 1 << 20], np.int32),
        (np.stack([row, row]),),
        (KVCacheGroup(16, 1 << 17),),
    )
    expected = Guard(step.groups).unsafe_cuts(step)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: Guard(step.groups).unsafe_cuts(step), range(16)))
    assert found == [expected] * 16
    assert expected[0].last == (1 << 20) + 15


OUT_OF_MEMORY = """
import resource
from ubatch_guard import AllocationError, Guard, KVCacheGroup, Mirror, UnknownRequestError

with open("/proc/self/statm") as statm:
    most = int(statm.read().split()[0]) * resource.getpagesize() + (48 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
huge = KVCacheGroup(16, 2**31 - 1)
small = Mirror([KVCacheGroup(16, 64)])
for make, error in (
    (lambda: Guard([huge]), AllocationError),
    (lambda: Guard([KVCacheGroup(16, 2**28)] * 8), AllocationError),
    (lambda: small.slots(range(2**40)), UnknownRequestError),
    (lambda: small.slots(range(2**40), missing=True), AllocationError),
    (lambda: small.add("r", [iter(lambda: 1, 2)]), AllocationError),
):
    try:
        make()
    except error as caught:
        print(type(caught).__name__, caught)
    else:
        raise SystemExit("made")
assert len(small) == 0
small.add("r", [[1]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on memory is needed")
def test_memory_that_is_not_there_is_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "AllocationError",
        "AllocationError",
        "UnknownRequestError",
        "AllocationError",
        "AllocationError",
    ]


def test_a_row_that_ends_before_its_tokens() -> None:
    mirror = Mirror([GROUP])
    mirror.add("r", [[1]])
    mirror.add("s", [[2]])
    slots = mirror.slots(["r", "s"])
    with pytest.raises(UnknownRequestError, match=r"slots.1. is -1"):
        mirror.first_difference(np.array([0, -1], np.int32), 0, TABLE, np.array([1, 1]))
    tokens = np.array([16, 17], np.int32)
    with pytest.raises(ShapeError, match="the row of request 1 has 1 columns, its tokens need 2"):
        mirror.is_safe(slots, np.zeros(2, np.int32), tokens)
    with pytest.raises(ShapeError, match="group 1 of 1"):
        mirror.row("r", 1)
    with pytest.raises(ShapeError, match="has 2 columns, its tokens need 3"):
        mirror.first_difference(slots, 0, TABLE[:, :2], np.array([3, 3]))
