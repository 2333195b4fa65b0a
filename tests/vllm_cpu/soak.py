"""``make soak-vllm``: random traffic on the real engine, thousands of requests, against the uncut run.

``python soak.py PAGE [--requests N] [--seed N]`` ends with status 1 if a guarded answer is wrong, if an
eligible step was not cut, or if nothing goes wrong without the guard. Otherwise its table goes into PAGE.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import outcomes
from cases import preemptions
from cpu_engine import Engine
from tiny_models import save_tiny_model
from workloads import RandomTraffic, Workload

from ubatch_guard.step import Policy

UNGUARDED_EVERY = 5
"""Of this many batches one is run without the guard as well."""
REQUESTS_A_BATCH = 64
_NGRAMS = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1, "num_speculative_tokens": 3}


@dataclass(frozen=True, slots=True)
class Traffic:
    """An engine, and what it is asked.

    Attributes:
        name: For the table.
        share: Of all requests.
        options: Of the engine.
        sliding_window: Of every other layer, in tokens; None: full attention.
        longest_answer: In tokens.
    """

    name: str
    share: float
    options: dict[str, Any]
    sliding_window: int | None = None
    longest_answer: int = 3


TRAFFIC = (
    Traffic("room for every step", 0.3, {"max_num_batched_tokens": 8192}),
    Traffic("chunks of 300", 0.25, {"max_num_batched_tokens": 300}),
    Traffic(
        "small pool",
        0.1,
        {"max_num_batched_tokens": 512, "max_model_len": 1024, "num_gpu_blocks_override": 48},
        longest_answer=16,
    ),
    Traffic("sliding window", 0.2, {"max_num_batched_tokens": 1024}, sliding_window=128),
    Traffic(
        "sliding window, n-gram drafts",
        0.15,
        {"max_num_batched_tokens": 1024, "speculative_config": _NGRAMS},
        sliding_window=128,
        longest_answer=6,
    ),
)
CUTS = tuple((num_ubatches, min_tokens) for num_ubatches in (2, 3) for min_tokens in (2, 16, 64))
"""Microbatches, and the threshold in tokens; every batch takes the next."""


@dataclass(slots=True)
class Tally:
    """What came of one kind of traffic.

    Attributes:
        wrong: Under the guard (``reorder``).
        unguarded: Requests that were also run without it, and
        unguarded_wrong: those of them that were answered wrongly.
    """

    requests: int = 0
    steps: int = 0
    eligible: int = 0
    split: int = 0
    reordered: int = 0
    preempted: int = 0
    wrong: int = 0
    unguarded: int = 0
    unguarded_wrong: int = 0
    findings: int = 0
    vetoed: dict[str, int] = field(default_factory=dict)

    def row(self, name: str) -> str:
        """As a line of the table."""
        cells = [name, self.requests, self.steps, self.eligible, self.split, self.reordered, self.preempted]
        cells += [self.wrong, f"{self.unguarded_wrong} of {self.unguarded}"]
        return f"| {' | '.join(map(str, cells))} |"

    @property
    def right(self) -> bool:
        """No wrong answer and every eligible step cut; and wrong answers without the guard."""
        guarded = self.wrong == self.findings == 0 and self.split == self.eligible > 0
        return guarded and self.unguarded_wrong > 0


HEADER = """\
| traffic | requests | steps | eligible | cut | reordered | preemptions | wrong | wrong without the guard |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def soak(traffic: Traffic, requests: int, seed: int, tell: Callable[[str], None]) -> Tally:
    """Run so many requests of one kind of traffic, in batches."""
    tally = Tally()
    source = RandomTraffic(seed, longest_answer=traffic.longest_answer)
    with _engine(traffic) as engine, preemptions(engine) as preempted:
        for number in range(-(-requests // REQUESTS_A_BATCH)):
            workload = source.workload(REQUESTS_A_BATCH)
            num_ubatches, min_tokens = CUTS[number % len(CUTS)]
            _batch(
                engine,
                workload,
                tally,
                {"dbo": True, "num_ubatches": num_ubatches, "min_tokens": min_tokens},
                unguarded=number % UNGUARDED_EVERY == 0,
                preempted=preempted,
            )
            if number % 5 == 4:
                tell(tally.row(traffic.name))
    if tally.vetoed or tally.findings:
        tell(f"{traffic.name}: vetoed {tally.vetoed}, {tally.findings} findings at the cut")
    return tally


def _batch(
    engine: Engine,
    workload: Workload,
    tally: Tally,
    cut: dict[str, Any],
    *,
    unguarded: bool,
    preempted: list[str],
) -> None:
    requests = len(workload.prompts)
    engine.set(**cut | {"dbo": False})
    whole = engine.run(workload)
    before = len(preempted)
    engine.set(**cut, policy=Policy.REORDER, verify_every=1)
    guarded = engine.run(workload)
    counters = engine.guard.counters
    tally.preempted += len(preempted) - before
    tally.requests += requests
    tally.steps += guarded.steps.steps
    tally.eligible += guarded.steps.eligible
    tally.split += guarded.steps.split
    tally.reordered += counters.reordered
    tally.wrong += guarded.num_wrong(whole)
    tally.findings += counters.verify_findings
    for reason, count in counters.vetoed.items():
        tally.vetoed[reason] = tally.vetoed.get(reason, 0) + count
    if unguarded:
        engine.set(**cut)
        tally.unguarded += requests
        tally.unguarded_wrong += engine.run(workload).num_wrong(whole)


@contextmanager
def _engine(traffic: Traffic) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "model", sliding_window=traffic.sliding_window)
        engine = Engine(model, **traffic.options)
        yield engine
        engine.close()


def _total(tallies: list[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        for name in Tally.__slots__:
            if name != "vetoed":
                setattr(total, name, getattr(total, name) + getattr(tally, name))
    return total


def main() -> int:
    """Soak, print, and write the table."""
    import vllm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start = time.monotonic()
    print(HEADER, flush=True)
    tallies = []
    for place, traffic in enumerate(TRAFFIC):
        requests = round(arguments.requests * traffic.share)
        seed = arguments.seed * len(TRAFFIC) + place
        tallies.append(soak(traffic, requests, seed, lambda line: print(line, flush=True)))
    total = _total(tallies)
    minutes = (time.monotonic() - start) / 60
    rows = [total.row("**all**"), *(t.row(of.name) for of, t in zip(TRAFFIC, tallies, strict=True))]
    table = "\n".join([HEADER, *rows])
    print(f"\n{table}\n{minutes:.0f} minutes", flush=True)
    if not all(tally.right for tally in tallies):
        print("NOT as it should be", file=sys.stderr)
        return 1
    text = (
        f"Made by `make soak-vllm` on {datetime.date.today()}, seed {arguments.seed}, "
        f"in {minutes:.0f} minutes: random traffic over nested and forked prefixes, suffixes of 1 to 300 "
        f"tokens, in batches of {REQUESTS_A_BATCH}. Each batch is run whole and under the guard (`reorder`, "
        "each cut checked at the cut), the batches in turn with 2 and 3 microbatches and thresholds of 2, 16 "
        f"and 64 tokens; one of {UNGUARDED_EVERY} is run without the guard too. *Cut*: eligible steps that "
        "were."
    )
    outcomes.write_section(arguments.page, f"Soak on vLLM {vllm.__version__}", f"{text}\n\n{table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
