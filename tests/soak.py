"""Wears the guard: millions of steps of random traffic, answers sampled, memory watched.

``python tests/soak.py --steps N --hook-steps N [--seed N]``. `core` feeds a mirror and asks it about every
step; `hooks` drives guarded runners of the V1 and V2 shape. Sampled steps are compared with the reference and
the slot-by-slot oracle, from the scheduler's own books. Exit status 1: an answer was wrong, or memory grew.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import oracle
from shapes import Scheduler, guarded

from ubatch_guard import reference
from ubatch_guard._core import Checker, Mirror
from ubatch_guard.hook_cases import SchedulerOutput
from ubatch_guard.settings import Settings
from ubatch_guard.step import KVCacheGroup, Policy, Step, UnsafeCuts

GROUPS = (
    KVCacheGroup(4, 1024),
    KVCacheGroup(4, 1024, sliding_window=20),
    KVCacheGroup(8, 1024, attention_chunk_size=32),
)
SAMPLE = 2000
"""Every so many steps one is compared, and of those with an unsafe cut every tenth of that."""
MOST_KB = 20.0
"""That memory may grow by in 100,000 steps,"""
SLACK_KB = 1024.0
"""and over a whole run, however short."""
_MOST_RUNNING = 12
_CHUNK = 32
_LONGEST = 160
_REPORTS = 20
_QUIET = 20_000
"""Steps without a word."""
_WARM = 5000
"""Steps after which memory is looked at."""


class WrongError(AssertionError):
    """An answer is not what reference or oracle say, or memory grew."""


class Traffic:
    """A scheduler under random load: shared prefixes, chunks, preemption, requests that end at any time."""

    def __init__(self, random: Random, resumed_are_new: bool) -> None:
        self.scheduler = Scheduler(GROUPS, _CHUNK, resumed_are_new)
        self._random = random
        self._serial = 0

    def step(self) -> SchedulerOutput:
        random, scheduler = self._random, self.scheduler
        for name, request in list(scheduler.running.items()):
            reached = request.num_computed_tokens + request.num_scheduled_tokens
            if reached >= request.end or random.random() < 0.003:
                scheduler.finish(name)
            elif random.random() < 0.002:
                scheduler.preempt(name)
        arriving = 0
        while len(scheduler.running) + arriving < _MOST_RUNNING and random.random() < 0.5:
            arriving += 1
            self._arrive()
        if not scheduler.running and not arriving:
            self._arrive()
        return scheduler.step()

    def _arrive(self) -> None:
        random = self._random
        self._serial += 1
        tokens = random.randint(2, _LONGEST)
        # Also one that arrives in this very step.
        donors = [*self.scheduler.running, f"r{self._serial - 1}"]
        donor = random.choice(donors) if random.random() < 0.8 else None
        most = random.randint(1, _LONGEST)
        self.scheduler.arrive(f"r{self._serial}", tokens, donor, most, end=tokens + random.randint(1, 15))


@dataclass
class Watch:
    """Progress, counts and memory of a run.

    Attributes:
        name: What is run.
        steps: How many.
        counts: Of whatever is worth counting.
        sizes: Step number and resident memory in KB, once all is warm.
    """

    name: str
    steps: int
    counts: Counter[str] = field(default_factory=Counter)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    def look(self, number: int) -> None:
        """After step ``number``, from 1 on."""
        if number % max(1, self.steps // (10 * _REPORTS)) == 0 and number >= max(_WARM, self.steps // 10):
            self.sizes.append((number, _resident_kb()))
        if number % max(_QUIET, self.steps // _REPORTS) == 0:
            rate = number / (time.monotonic() - self._started)
            print(f"{self.name}: {number} steps, {rate:.0f} a second, {_resident_kb()} KB", flush=True)

    def end(self) -> None:
        """Print what was counted.

        Raises:
            WrongError: Memory grew.
        """
        slope = slope_of(self.sizes)
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        memory = (
            f"memory {slope:+.1f} KB per 100,000 steps" if len(self.sizes) > 1 else "too short for memory"
        )
        print(f"{self.name}: {self.steps} steps, {counts}; {memory}")
        if not is_flat(self.sizes):
            raise WrongError(f"{self.name}: memory grows by {slope:.1f} KB per 100,000 steps")


def slope_of(sizes: list[tuple[int, int]]) -> float:
    """Growth in KB per 100,000 steps, by least squares; of ``(step number, KB)``."""
    if len(sizes) < 2:
        return 0.0
    steps, kb = np.array(sizes, dtype=np.float64).T
    return float(np.polyfit(steps, kb, 1)[0]) * 1e5


def is_flat(sizes: list[tuple[int, int]]) -> bool:
    """Whether memory grew by no more than it may."""
    if len(sizes) < 2:
        return True
    span = (sizes[-1][0] - sizes[0][0]) / 1e5
    return slope_of(sizes) * span <= SLACK_KB + MOST_KB * span


def core(steps: int, seed: int, sample: int = SAMPLE) -> Counter[str]:
    """Steps of mirror, check and order.

    Raises:
        WrongError: An answer is wrong, or memory grew.
    """
    random = Random(seed)
    traffic = Traffic(random, resumed_are_new=True)
    mirror, watch = Mirror(GROUPS), Watch("core", steps)
    counts = watch.counts
    for number in range(1, steps + 1):
        output = traffic.step()
        _follow(mirror, output)
        names = list(output.num_scheduled_tokens)
        # Any order: the scheduler's own is a safe one.
        random.shuffle(names)
        running = traffic.scheduler.running
        computed = np.array([running[name].num_computed_tokens for name in names], dtype=np.int32)
        scheduled = np.array([running[name].num_scheduled_tokens for name in names], dtype=np.int32)
        batch = mirror.slots(names), computed, scheduled
        safe, unsafe, order = mirror.is_safe(*batch), [], None
        if not safe:
            unsafe, order = mirror.unsafe_cuts(*batch), mirror.order(*batch)
            counts["unsafe"] += 1
        if number % sample == 0 or (not safe and counts["unsafe"] % max(1, sample // 10) == 0):
            counts["compared"] += 1
            _compare(traffic.scheduler.as_step(names), safe, unsafe, order, f"core, step {number}")
            _same_rows(mirror, traffic.scheduler, names)
        watch.look(number)
    if len(mirror) != len(traffic.scheduler.running):
        raise WrongError(f"{len(mirror)} rows for {len(traffic.scheduler.running)} requests")
    watch.end()
    return counts


def _follow(mirror: Mirror, output: SchedulerOutput) -> None:
    for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
        mirror.free(name)
    cached = output.scheduled_cached_reqs
    mirror.append_each(cached.req_ids, cached.new_block_ids)
    for request in output.scheduled_new_reqs:
        mirror.add(request.req_id, request.block_ids)


def _compare(step: Step, safe: bool, unsafe: list[Any], order: Any, where: str) -> None:
    """The core's answers about a step against reference, stateless check and oracle."""
    found = tuple(UnsafeCuts(*fields) for fields in unsafe)
    if found != reference.unsafe_cuts(step):
        raise WrongError(f"{where}: {found}, the reference says {reference.unsafe_cuts(step)}")
    cuts = {cut for each in found for cut in range(each.first, each.last + 1)}
    if cuts != oracle.unsafe_cuts(step) or safe is bool(cuts):
        raise WrongError(f"{where}: safe {safe}, {cuts}, the oracle says {oracle.unsafe_cuts(step)}")
    arrays = step.block_tables, step.num_computed_tokens, step.num_scheduled_tokens
    if not safe and order != Checker(step.groups).order(*arrays):
        raise WrongError(f"{where}: the order is not that of the stateless check")
    if order is None:
        # Writers go before readers in the scheduler's own order, so that there is always one.
        if not safe:
            raise WrongError(f"{where}: no order was found")
    elif oracle.unsafe_cuts(step.permuted(order[0])):
        raise WrongError(f"{where}: the order is unsafe")


def _same_rows(mirror: Mirror, scheduler: Scheduler, names: list[str]) -> None:
    for name in names:
        for place, row in enumerate(scheduler.running[name].rows):
            if mirror.row(name, place).tolist() != row:
                raise WrongError(f"the row of {name} in group {place} differs")


def hooks(shape: str, policy: Policy, steps: int, seed: int, sample: int = SAMPLE) -> Counter[str]:
    """Steps of a guarded runner.

    Raises:
        WrongError: A vote is wrong, the guard counts something that must not be, or memory grew.
    """
    traffic = Traffic(Random(seed), resumed_are_new=shape == "v2")
    settings = Settings(policy=policy, log_interval=0.0, verify_every=sample)
    runner, watch = guarded(shape, settings, GROUPS), Watch(f"hooks {shape} {policy.value}", steps)
    counts = watch.counts
    for number in range(1, steps + 1):
        ran = runner.run(traffic.step())
        moved = ran.order != ran.own_order
        touched = moved or not ran.allowed
        counts["reordered"] += moved
        counts["vetoed"] += not ran.allowed
        if number % sample == 0 or (touched and sum(counts.values()) % max(1, sample // 10) == 0):
            counts["compared"] += 1
            own = oracle.unsafe_cuts(traffic.scheduler.as_step(ran.own_order))
            final = oracle.unsafe_cuts(traffic.scheduler.as_step(ran.order))
            right = (
                (ran.allowed and not final and moved <= bool(own))
                if policy is Policy.REORDER
                else (ran.allowed is not bool(own) and not moved)
            )
            if not right:
                raise WrongError(f"{watch.name}, step {number}: {ran}, unsafe cuts {own}, then {final}")
        watch.look(number)
    guard = runner.ubatch_guard
    assert guard is not None
    counted = guard.counters
    if (
        counted.steps != steps
        or counted.unasked
        or counted.mirror_differences
        or counted.verify_findings
        or counted.vetoed.keys() - ({"unsafe"} if policy is Policy.VETO else set())
    ):
        raise WrongError(f"{watch.name}: {counted.line()}")
    watch.end()
    return counts


def _resident_kb() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000_000, help="of mirror, check and order")
    parser.add_argument("--hook-steps", type=int, default=2_000_000, help="of the hooks, all shapes together")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="compare one step in so many")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        core(asked.steps, asked.seed, asked.sample)
        for shape in ("v1", "v2"):
            for policy in (Policy.REORDER, Policy.VETO):
                hooks(shape, policy, asked.hook_steps // 4, asked.seed, asked.sample)
    except WrongError as error:
        print(f"WRONG: {error}")
        return 1
    print(f"all right, in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
