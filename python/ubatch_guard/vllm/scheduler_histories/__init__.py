"""Random histories on the installed vLLM's own scheduler and KV cache manager, without a model.

What a model runner would do with each step is followed slot by slot. So it is known, for any order that the
batch may be given, whether some cut makes a request read what a later one has still to write (an *unsafe*
step), and whether a step is wrong even if it runs whole. docs/scheduler-order.md says what this is to show.

vLLM is imported by `run` alone; `ENVIRONMENT` has to be set before that.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ubatch_guard.vllm.scheduler_histories.history import History
from ubatch_guard.vllm.scheduler_histories.orders import (
    ORDERS,
    MakeOrder,
    Order,
    new_request_ids,
    running_first,
)
from ubatch_guard.vllm.scheduler_histories.runner import Step
from ubatch_guard.vllm.scheduler_histories.scheduler import NotAvailable, Options, installed_vllm

__all__ = [
    "ENVIRONMENT",
    "ORDERS",
    "MakeOrder",
    "NotAvailable",
    "Order",
    "new_request_ids",
    "run",
    "running_first",
]

ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""With these vLLM's scheduler can be made on any machine."""

_STEPS_PER_HISTORY = 250
_COUNTS = ("steps", "histories", "reads", "preempted", "drafted", "loads", "set_back")
_FINDINGS = ("sharing_steps", "running_reader_steps", "wrong_whole_steps", "written_twice_steps")


def run(
    seed: int,
    steps: int,
    failing_loads: bool = False,
    *,
    orders: Mapping[str, MakeOrder] = ORDERS,
    policy: str | None = None,
) -> dict[str, Any]:
    """Run histories of at most 250 steps each, ``steps`` in all.

    Args:
        seed: Histories of other seeds differ; one repeats itself under the same ``PYTHONHASHSEED``.
        steps: Scheduler outputs in all.
        failing_loads: Whether a KV connector's loads fail, which sets running requests back.
        orders: The orders to judge, by name. What they are given must not be changed.
        policy: ``"fcfs"`` or ``"priority"``; None draws one for each history.

    Returns:
        Plain data: ``vllm`` (version), ``runner`` (the model runner that the scheduler works for), ``seed``,
        how often what happened (``steps`` first), ``sharing_steps`` (where a request reads what another one
        writes in the same step), ``running_reader_steps`` (where that request is neither new nor resumed),
        ``wrong_whole_steps`` (wrong even if run whole; not counted where a load fails in it),
        ``written_twice_steps`` (two requests write the same slot), ``unsafe_steps`` per order, ``absent``
        (options that this release has not), ``stopped`` (the errors that ended histories, and how many) and
        ``first`` (per finding where it was seen first).

    Raises:
        NotAvailable: This vLLM cannot be driven so.
    """
    vllm = installed_vllm()
    count: Counter[str] = Counter(dict.fromkeys((*_COUNTS, *_FINDINGS), 0))
    unsafe: Counter[str] = Counter(dict.fromkeys(orders, 0))
    stopped: Counter[str] = Counter()
    first: dict[str, Any] = {}
    absent: set[str] = set()
    while not count["histories"] or count["steps"] < steps:
        history_seed = seed * 100_000 + count["histories"]
        rng = random.Random(history_seed)
        options = Options.draw(rng, failing_loads)
        if policy is not None:
            options = replace(options, policy=policy)
        history = History(str(history_seed), options, rng, orders)
        absent.update(history.absent)
        count["histories"] += 1
        where: dict[str, Any] = {"seed": history_seed, "options": asdict(options)}
        for number in range(min(_STEPS_PER_HISTORY, steps - count["steps"])):
            where["step"] = number
            try:
                step, unsafe_pairs = history.step(count)
            except NotAvailable:
                raise
            except Exception as error:  # a finding, whatever a release raises; the other histories go on
                name = f"{type(error).__name__}: {error}"[:200]
                stopped[name] += 1
                first.setdefault(name, dict(where))
                break
            for finding, what in _findings(step).items():
                count[finding] += 1
                first.setdefault(finding, {**where, "what": what})
            for name, pair in unsafe_pairs.items():
                unsafe[name] += 1
                first.setdefault(name, {**where, "what": pair})
    return {
        "vllm": vllm.version,
        "runner": history.runner,
        "seed": seed,
        **count,
        "unsafe_steps": dict(unsafe),
        "absent": sorted(absent),
        "stopped": dict(stopped),
        "first": first,
    }


def _findings(step: Step) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sharing_steps": [asdict(sharing) for sharing in step.reads.sharing],
        "running_reader_steps": [
            asdict(sharing) for sharing in step.reads.sharing if sharing.reader not in step.new
        ],
        "wrong_whole_steps": [] if step.lost_blocks else step.reads.wrong,
        "written_twice_steps": step.written_twice,
    }
    return {name: what[0] for name, what in found.items() if what}
