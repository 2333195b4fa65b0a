"""``ubatch-guard bench``: what the guard costs here, against vLLM's rule in numpy, and the goals.

Times are those of the Python calls, in microseconds of the thread's own processor time, so that what else
runs on the machine counts as little as can be. All that is compared runs in turns, and medians are given.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from ubatch_guard import reference
from ubatch_guard._core import Checker, Mirror, _read_floor
from ubatch_guard.cases import (
    CASES,
    CONTEXTS,
    DECODE_THRESHOLD,
    Case,
    by_name,
    cuts_of,
    hit_of_context,
    of_context,
    rows_of,
)
from ubatch_guard.hook_cases import HOOK_CASES, NUM_STEPS, HookCase, HookSubjects, hook_case
from ubatch_guard.step import KVCacheGroup, Step

Call = Callable[[], object]

_SAMPLE_SECONDS = 1e-3
"""A sample repeats its call until it lasts about this long: far above the clock's resolution."""

_FLOOR_TOKENS = 100_000
"""Below this many tokens read, a call's own cost is all there is, and a floor says nothing."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a case should reach; None: nothing is asked.

    Attributes:
        mirror: Least ratio of the numpy rule's time to the mirror's.
        stateless: Least ratio of the numpy rule's time to the stateless check's.
        floor: Greatest ratio of the stateless check's time to one read of the readers' rows.
    """

    mirror: float | None = None
    stateless: float | None = None
    floor: float | None = None


GOALS = {
    "gsm8k": Goal(mirror=20, stateless=20),
    "decode256": Goal(mirror=1, stateless=1),
    "mixed256": Goal(mirror=200, stateless=100),
    "long1024": Goal(mirror=1000, floor=3),
    "rag512": Goal(mirror=1000, floor=3),
}

IN_SHORT = {
    "decode256": "256 decodes",
    "mixed256": "224 decodes, 24 readers of 8k tokens, 8 writers",
}
HOOKS_IN_SHORT = "hooks-v2-256"

HOOKS_DECODES_GOAL = {"v1": 3.0}
"""All hooks of a step without new requests, against vLLM's rule in numpy."""
HOOKS_DECODES_US_GOAL = {"v2": 2.0}
"""The same in microseconds."""
HOOKS_ARRIVING_GOAL = {"v2": 1.0}
"""All hooks of a step with new requests, against the sort of its batch."""
GROWTH_GOAL = 1.5
"""The mirror at 1M tokens of context against 1k, at equal work."""
UPKEEP_GOAL = 5.0
"""ns per block added to or freed from the mirror."""
BLOCK_BYTES_GOAL = 16.0
ENTRY_BYTES_GOAL = 8.0


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Medians for one case, in microseconds a call, and their ratios.

    Attributes:
        case: Its name.
        numpy_us: vLLM's rule in numpy.
        mirror_us: ``Mirror.is_safe``.
        stateless_us: ``Checker.is_safe``, told what earlier steps wrote (``num_settled_tokens``).
        floor_us: One read of the readers' rows; None in a case that is about something else.
        mirror_ratio: ``numpy_us / mirror_us``.
        stateless_ratio: ``numpy_us / stateless_us``.
        stateless_floor_ratio: ``stateless_us / floor_us``.
        unsettled_us: The stateless check told nothing: every request's prefix is read.
        slots_us: ``Mirror.slots``: finding the rows of a batch by request id, where the batch has changed.
    """

    case: str
    numpy_us: float
    mirror_us: float
    stateless_us: float
    floor_us: float | None
    mirror_ratio: float
    stateless_ratio: float
    stateless_floor_ratio: float | None
    unsettled_us: float
    slots_us: float


@dataclass(frozen=True, slots=True)
class HooksResult:
    """Medians of what the hooks add to a step, in microseconds a step.

    Attributes:
        case: Its name.
        hooks_us: All hooks together: a runner whose methods do nothing with them, less the same without.
        yardstick_us: What vLLM does about such a step itself: V1 its rule in numpy, V2 the sort of its batch.
        ratio: ``hooks_us / yardstick_us``.
        floor_us: One look at each block id of the new rows; None in a case without.
        floor_ratio: ``hooks_us / floor_us``.
    """

    case: str
    hooks_us: float
    yardstick_us: float
    ratio: float
    floor_us: float | None
    floor_ratio: float | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that is not about a case.

    Attributes:
        case: What was measured.
        value: The number.
        unit: Its unit.
        goal: The greatest value asked for, if any.
        detail: What it was made of: microseconds by tokens of context.
    """

    case: str
    value: float
    unit: str
    goal: float | None = None
    detail: dict[str, float] = field(default_factory=dict)


class Subjects:
    """All that can be asked about one step, ready to be timed: calls without arguments.

    Attributes:
        step: The step.
        request_ids: Names of its requests, in batch order.
        mirror: A mirror that holds the step's rows.
        slots: The batch in the mirror.
        numpy_rule: vLLM's rule.
        mirrored: The mirror's answer about the feasible cuts.
        stateless: The stateless answer, told what is settled.
        unsettled: The stateless answer, told nothing.
        unsafe_cuts: The mirror's unsafe cuts among the feasible ones.
        order: The mirror's batch order.
        find_slots: Look the batch up in the mirror.
    """

    def __init__(self, step: Step, decode_threshold: int = DECODE_THRESHOLD) -> None:
        self.step = step
        self.cuts = cuts_of(step)
        self.decode_threshold = decode_threshold
        self.request_ids = [f"request-{position}" for position in range(step.num_reqs)]
        self.mirror = Mirror(step.groups)
        for request_id, rows in zip(self.request_ids, rows_of(step), strict=True):
            self.mirror.add(request_id, rows)
        self.slots = self.mirror.slots(self.request_ids)
        counts = step.num_computed_tokens, step.num_scheduled_tokens
        cuts = self.cuts.first, self.cuts.last
        checker = Checker(step.groups)
        self.numpy_rule = functools.partial(reference.vllm_allows, step, decode_threshold)
        self.mirrored = functools.partial(self.mirror.is_safe, self.slots, *counts, *cuts)
        self.stateless = functools.partial(
            checker.is_safe, step.block_tables, *counts, *cuts, step.num_settled_tokens
        )
        self.unsettled = functools.partial(checker.is_safe, step.block_tables, *counts, *cuts)
        self.unsafe_cuts = functools.partial(self.mirror.unsafe_cuts, self.slots, *counts, *cuts)
        self.order = functools.partial(self.mirror.order, self.slots, *counts)
        self.find_slots = functools.partial(self.mirror.slots, self.request_ids)

    def floor(self, case: Case) -> Call:
        """One read of the rows of the case's readers, as far as their contexts go."""
        readers = slice(case.decodes, case.decodes + case.readers)
        rows = self.step.block_tables[0][readers, : case.context // case.block]
        return functools.partial(_read_floor, np.asarray(rows, dtype=np.int32))

    def check(self, safe: bool | None = None) -> None:
        """Compare every answer with the reference's, ``safe`` if it is known.

        Raises:
            AssertionError: One is wrong.
        """
        if safe is None:
            safe = not reference.unsafe_cuts(self.step, self.cuts)
        answers = {"mirror": self.mirrored(), "stateless": self.stateless()}
        if self.step.num_settled_tokens is None or safe:
            # In the cases here nothing is shared, so that what is settled does not change the answer.
            answers["stateless, unsettled"] = self.unsettled()
        wrong = [name for name, answer in answers.items() if answer is not safe]
        if wrong:
            raise AssertionError(f"the reference says safe={safe}, not so: {', '.join(wrong)}")


def in_turns(
    calls: Mapping[str, Call], rounds: int, setups: Mapping[str, Call] | None = None
) -> dict[str, float]:
    """Median time of each call in microseconds, all timed in turns so that noise meets them alike.

    Args:
        calls: What is timed.
        rounds: Samples a median is taken of.
        setups: What makes some of the calls ready, outside of the time; such a sample is a single call.
    """
    setups = setups or {}
    timers = {
        name: timeit.Timer(call, setups.get(name, "pass"), timer=time.thread_time)
        for name, call in calls.items()
    }
    repeats = {}
    for name, timer in timers.items():
        timer.timeit(1)
        repeats[name] = (
            1 if name in setups else max(1, math.ceil(_SAMPLE_SECONDS / max(timer.timeit(3) / 3, 1e-7)))
        )
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.timeit(repeats[name]) / repeats[name] * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def measure(case: Case, rounds: int) -> CaseResult:
    """Check one case against the reference, then time it."""
    subjects = Subjects(case.step())
    subjects.check()
    if subjects.numpy_rule() is not True:
        raise AssertionError("vLLM's rule refuses a step whose rows share no block")
    calls: dict[str, Call] = {
        "numpy": subjects.numpy_rule,
        "mirror": subjects.mirrored,
        "stateless": subjects.stateless,
        "unsettled": subjects.unsettled,
        "slots": subjects.find_slots,
    }
    if case.readers * case.context > _FLOOR_TOKENS:
        calls["floor"] = subjects.floor(case)
    us = in_turns(calls, rounds)
    floor = us.get("floor")
    return CaseResult(
        case=case.name,
        numpy_us=us["numpy"],
        mirror_us=us["mirror"],
        stateless_us=us["stateless"],
        floor_us=floor,
        mirror_ratio=us["numpy"] / us["mirror"],
        stateless_ratio=us["numpy"] / us["stateless"],
        stateless_floor_ratio=None if floor is None else us["stateless"] / floor,
        unsettled_us=us["unsettled"],
        slots_us=us["slots"],
    )


def measure_hooks(case: HookCase, rounds: int) -> HooksResult:
    """Check one case, then time it: what the hooks add to a step, over many steps in a row."""
    subjects = HookSubjects(case)
    subjects.check()
    calls: dict[str, Call] = {
        "guarded": subjects.guarded,
        "bare": subjects.bare,
        "yardstick": subjects.yardstick,
    }
    if case.arriving:
        calls["floor"] = subjects.floor
    us = in_turns(calls, rounds, {"guarded": subjects.open})
    hooks = (us["guarded"] - us["bare"]) / NUM_STEPS
    floor = us.get("floor")
    return HooksResult(
        case=case.name,
        hooks_us=hooks,
        yardstick_us=us["yardstick"],
        ratio=hooks / us["yardstick"],
        floor_us=floor,
        floor_ratio=None if floor is None else hooks / floor,
    )


def growth(rounds: int) -> Iterator[Figure]:
    """How the mirror's cost grows with context, at equal work, and in a step in which it must read rows."""
    steps = {
        "mirror-growth-context": [of_context(tokens).step() for tokens in CONTEXTS],
        "mirror-growth-context-hit": [hit_of_context(tokens) for tokens in CONTEXTS],
    }
    for name, of_contexts in steps.items():
        calls: dict[str, Call] = {}
        for tokens, step in zip(CONTEXTS, of_contexts, strict=True):
            subjects = Subjects(step)
            subjects.check()
            calls[f"{tokens}"] = subjects.mirrored
        us = in_turns(calls, rounds)
        # A block that is written and shared makes the mirror read the rows of the step's new readers.
        goal = GROWTH_GOAL if name == "mirror-growth-context" else None
        yield Figure(name, max(us.values()) / us[f"{CONTEXTS[0]}"], "x", goal, us)


def upkeep(rounds: int) -> Iterator[Figure]:
    """What it costs to keep the mirror up, in nanoseconds a block.

    A prompt of 8k tokens comes with 512 blocks and leaves with them; the ids are scattered over a pool of
    four million tokens. Decodes get a block at a time, where the cost is that of finding the request.
    """
    num_reqs, row_blocks, num_blocks = 64, 512, 1 << 18
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
    arrays = np.split(ids[: num_reqs * row_blocks], num_reqs)
    lists = [row.tolist() for row in arrays]
    grown = [([block],) for block in ids[-num_reqs:].tolist()]
    request_ids = [f"request-{position}" for position in range(num_reqs)]
    mirror = Mirror([KVCacheGroup(16, num_blocks)])
    all_blocks = num_reqs * row_blocks

    def add(rows: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:
        for request_id, row in zip(request_ids, rows, strict=True):
            mirror.add(request_id, (row,))

    def free() -> None:
        for request_id in request_ids:
            mirror.free(request_id)

    life: list[tuple[str, Call, int]] = [
        ("mirror-add-lists", functools.partial(add, lists), all_blocks),
        ("mirror-append-each", functools.partial(mirror.append_each, request_ids, grown), num_reqs),
        ("mirror-free", free, all_blocks + num_reqs),
        ("mirror-add-arrays", functools.partial(add, arrays), all_blocks),
        ("mirror-free", free, all_blocks),
        # What Python itself takes to look at every number of a list.
        ("sum-of-lists", lambda: list(map(sum, lists)), all_blocks),
    ]
    add(lists)
    if [mirror.row(request_id, 0).tolist() for request_id in request_ids] != lists:
        raise AssertionError("the mirror does not hold what was added")
    free()
    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, call, blocks in life:
            seconds = timeit.Timer(call, timer=time.thread_time).timeit(1)
            samples.setdefault(name, []).append(seconds / blocks * 1e9)
    for name, values in samples.items():
        # A block at a time is no bulk, so that it has no goal.
        goal = UPKEEP_GOAL if name.startswith(("mirror-add", "mirror-free")) else None
        yield Figure(name, statistics.median(values), "ns/block", goal)


def memory() -> Iterator[Figure]:
    """Bytes of the mirror: for each block of the pool, and for each entry of a row."""
    num_blocks, row_blocks = 1 << 18, 1 << 13
    group = KVCacheGroup(16, num_blocks)
    mirror = Mirror([group])
    row = np.arange(1, row_blocks + 1, dtype=np.int32)
    mirror.add("writer", (row,))
    mirror.add("reader", (row,))
    # An unsafe step makes the check take all the scratch that it ever takes.
    scheduled = np.array([64, row_blocks * 16], dtype=np.int32)
    computed = np.array([row_blocks * 16 - 64, 0], dtype=np.int32)
    if mirror.is_safe(mirror.slots(["reader", "writer"]), computed, scheduled):
        raise AssertionError("a reader before its writer is unsafe")
    mirror.clear()
    empty = mirror.nbytes
    yield Figure("mirror-bytes-per-block", empty / num_blocks, "B/block", BLOCK_BYTES_GOAL)
    for request_id in range(64):
        mirror.add(str(request_id), (row,))
    added = (mirror.nbytes - empty) / (64 * row_blocks)
    yield Figure("mirror-bytes-per-entry", added, "B/entry", ENTRY_BYTES_GOAL)
    mirror.clear()
    # Rows that grow by one block at a time, to lengths all over: their vectors have room to spare.
    entries = 0
    for length in range(row_blocks // 4, row_blocks, 128):
        mirror.add(str(length), (row[:64],))
        for block in row[: length - 64].tolist():
            mirror.append(str(length), ((block,),))
        entries += length
    grown = (mirror.nbytes - empty) / entries
    yield Figure("mirror-bytes-per-entry-grown", grown, "B/entry", ENTRY_BYTES_GOAL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Time the guard against vLLM's own rule, in numpy, on this machine."
    parser.add_argument("--json", action="store_true", help="every case, one JSON object a line")
    parser.add_argument(
        "--all",
        action="store_true",
        help="every case in tables, with the goals, and growth, upkeep and memory of the mirror",
    )
    parser.add_argument(
        "--rounds", type=_positive, default=15, help="samples that a median is taken of (default 15)"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def run(args: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    cases = itertools.chain.from_iterable((case, case.shuffle()) for case in CASES)
    results = (measure(case, args.rounds) for case in cases)
    hooks = (measure_hooks(case, args.rounds) for case in HOOK_CASES)
    figures = itertools.chain(growth(args.rounds), upkeep(args.rounds), memory()) if args.all else iter(())
    if args.json:
        lines: Iterator[CaseResult | HooksResult | Figure] = itertools.chain(results, hooks, figures)
        for line in lines:
            print(json.dumps(asdict(line)), flush=True)
    elif not args.all:
        _print_in_short(args.rounds)
    else:
        _print_tables(list(results), list(hooks), list(figures))
    return 0


def _print_in_short(rounds: int) -> None:
    """Three lines: a step as there are most, one with readers, and what a step of vLLM pays in all."""
    for name, what in IN_SHORT.items():
        result = measure(by_name(name), rounds)
        print(
            f"{what}: vLLM's rule {_digits(result.numpy_us)} us, the guard {_digits(result.mirror_us)} us "
            f"({_digits(result.mirror_ratio)} times as fast)",
            flush=True,
        )
    hooks = measure_hooks(hook_case(HOOKS_IN_SHORT), rounds)
    print(f"256 decodes, all hooks of Model Runner V2: {_digits(hooks.hooks_us)} us a step")


def _print_tables(
    results: Sequence[CaseResult], hooks: Sequence[HooksResult], figures: Sequence[Figure]
) -> None:
    from rich.console import Console
    from rich.table import Table

    def table(title: str, headings: Sequence[str]) -> Table:
        result = Table(title=title, title_justify="left")
        for index, heading in enumerate(headings):
            result.add_column(heading, justify="right" if index else "left", no_wrap=True)
        return result

    times = table("µs a call", ("case", "vLLM's rule", "mirror", "its slots", "stateless", "one read"))
    ratios = table(
        "times as fast as vLLM's rule (goal)", ("case", "mirror", "stateless", "stateless / one read")
    )
    for result in results:
        us = (result.numpy_us, result.mirror_us, result.slots_us, result.stateless_us, result.floor_us)
        times.add_row(result.case, *("-" if value is None else _digits(value) for value in us))
        goal = GOALS.get(result.case, Goal())
        ratios.add_row(
            result.case,
            _rated(result.mirror_ratio, goal.mirror, ">="),
            _rated(result.stateless_ratio, goal.stateless, ">="),
            _rated(result.stateless_floor_ratio, goal.floor, "<="),
        )
    around = table(
        "all hooks of a step, µs (goal)",
        ("case", "hooks", "vLLM", "/ vLLM", "one look", "/ one look"),
    )
    for case, line in zip(HOOK_CASES, hooks, strict=True):
        goals = HOOKS_ARRIVING_GOAL if case.arriving else HOOKS_DECODES_GOAL
        us_goal = None if case.arriving else HOOKS_DECODES_US_GOAL.get(case.runner)
        around.add_row(
            line.case,
            _rated(line.hooks_us, us_goal, "<="),
            _digits(line.yardstick_us),
            _rated(line.ratio, goals.get(case.runner), "<="),
            _rated(line.floor_us, None, "<="),
            _rated(line.floor_ratio, None, "<="),
        )
    console = Console()
    console.print(times)
    console.print(ratios)
    console.print(around)
    if figures:
        others = table("the mirror (goal)", ("figure", "value", "unit"))
        for figure in figures:
            others.add_row(figure.case, _rated(figure.value, figure.goal, "<="), figure.unit)
        console.print(others)


def _digits(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rated(value: float | None, goal: float | None, relation: str) -> str:
    """A value with its goal, red where it is not reached."""
    if value is None:
        return "-"
    if goal is None:
        return _digits(value)
    text = f"{_digits(value)} ({relation} {goal:g})"
    reached = value >= goal if relation == ">=" else value <= goal
    return text if reached else f"[red]{text}[/red]"


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m ubatch_guard.bench")
    add_arguments(_parser)
    sys.exit(run(_parser.parse_args()))
