"""One workload served whole, cut without a guard, and cut under each rule: who answers wrongly, and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .config import EngineConfig
from .guarded import make_runner
from .llm_engine import LLMEngine
from .model import DecoderModel
from .parallel import Ranks
from .sanitizer import UnwrittenRead
from .workloads import Workload

WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the workload, summed over the ranks.

    Attributes:
        policy: ``whole``: no step is cut; or the rule by which steps are.
        requests: Requests served.
        wrong: Requests whose tokens differ from those of the whole run.
        steps: Steps run.
        eligible: Of those, large enough to be cut.
        split: Cut.
        vetoed: Eligible and not cut.
        reordered: Brought into another order by the guard of a rank, large enough to be cut or not.
        unwritten_reads: KV slots read before they were written, over all layers; None: nobody watched.
    """

    policy: str
    requests: int
    wrong: int
    steps: int
    eligible: int
    split: int
    vetoed: int
    reordered: int
    unwritten_reads: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """A row, and what this rank alone knows.

    Attributes:
        outputs: Tokens of its requests.
        first_unsafe: Number of its first step with reads that came too early, and these; None: no such step.
    """

    row: Row
    outputs: dict[str, list[int]]
    first_unsafe: tuple[int, tuple[UnwrittenRead, ...]] | None

    def story(self) -> str | None:
        """What went wrong first, in a sentence; None: nothing."""
        if self.first_unsafe is None:
            return None
        step, reads = self.first_unsafe
        blocks = Counter(req_id for req_id, _ in {(read.req_id, read.block) for read in reads})
        most = max(blocks.values())
        return (
            f"{self.row.policy}, step {step}: {len(blocks)} requests read up to {most} "
            f"block{'s' * (most > 1)} each that a later microbatch had still to write"
        )


Progress = Callable[[str, int], Callable[[int], None]]
"""Called with a policy and a number of requests, answers what to call with the number that are through."""


def compare(
    policies: Sequence[str],
    workload: Workload,
    config: EngineConfig,
    model: DecoderModel,
    ranks: Ranks,
    progress: Progress,
) -> Iterator[Run]:
    """Serve the workload whole, then under each of the policies, each time on a fresh cache.

    Args:
        policies: Names that `guarded.make_runner` knows.
        workload: All ranks' requests; they are dealt out in turn.
        config: The engine.
        model: Its model.
        ranks: Those who serve together.
        progress: See `Progress`.
    """
    share = workload.of_rank(ranks.rank, ranks.size)
    whole = replace(config, parallel_config=replace(config.parallel_config, num_ubatches=1))
    right = _serve(WHOLE, share, whole, model, ranks, progress, None)
    yield right
    for policy in policies:
        yield _serve(policy, share, config, model, ranks, progress, right.outputs)


def _serve(
    policy: str,
    workload: Workload,
    config: EngineConfig,
    model: DecoderModel,
    ranks: Ranks,
    progress: Progress,
    right: dict[str, list[int]] | None,
) -> Run:
    rule = "unguarded" if policy == WHOLE else policy
    engine = LLMEngine(config, make_runner(rule, config, model, ranks))
    outputs = engine.serve(workload.requests, progress(policy, len(workload.requests)))
    wrong = sum(outputs[req_id] != tokens for req_id, tokens in (right or outputs).items())
    guard = getattr(engine.runner, "ubatch_guard", None)
    reordered = guard.counters.reordered if guard is not None else 0
    stats = engine.stats
    sums = ranks.sum(torch.tensor([len(outputs), wrong, reordered, stats.unwritten_reads])).tolist()
    row = Row(
        policy=policy,
        requests=sums[0],
        wrong=sums[1],
        steps=stats.steps,
        eligible=stats.eligible,
        split=stats.split,
        vetoed=stats.eligible - stats.split,
        reordered=sums[2],
        unwritten_reads=sums[3] if config.sanitize else None,
    )
    return Run(row, outputs, stats.first_unsafe)


FIELDS = tuple(field.name for field in dataclasses.fields(Row))
"""Names of a row's columns."""


def heading() -> str:
    """The table's first line, below 80 characters."""
    return _joined(FIELDS)


def line(row: Row) -> str:
    """A row as a line of the table."""
    values = dataclasses.asdict(row)
    return _joined(["-" if values[field] is None else str(values[field]) for field in FIELDS])


def _joined(cells: Sequence[str]) -> str:
    widths = (max(len(field), 9 if field == "policy" else 0) for field in FIELDS)  # "unguarded"
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def describe(device: str) -> str:
    """The device by name; torch calls a HIP device ``cuda`` too."""
    if device == "cpu":
        return "cpu"
    kind = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{torch.cuda.get_device_name(device)} ({kind})"
