"""What a guard has seen and done: plain counts, a log line, and Prometheus metrics.

Counting in a step is integer arithmetic; Prometheus gets the difference now and then
(`CounterExport.export`), so that its locks and files stay out of the step. In prometheus_client's
multiprocess mode (``PROMETHEUS_MULTIPROC_DIR``) the counts of worker processes reach the process that
serves ``/metrics``.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Labels = tuple[str, ...]


@dataclass(slots=True)
class Counters:
    """Counts since the start; every step that was voted on counts once.

    Attributes:
        steps: Steps voted on while the engine microbatches.
        eligible: Steps that the engine may cut: two requests or more, and the DBO token thresholds reached.
        eligible_allowed: Eligible steps that the guard let be cut.
        unsafe: Steps with an unsafe cut in the order they came in, by the kind of reader: ``running`` (ran
            before this step: a failed KV load), ``short`` (as short as a decode: vLLM's guard overlooks
            it), ``long``.
        reordered: Steps that were reordered.
        requests_moved: Requests that changed places, over all of these.
        vetoed: Steps voted "no" on, by reason: ``unsafe``, ``no_order``, or why the step could not be
            decided.
        verdicts: ``(guard, vllm)`` verdicts of the steps in which vLLM's guard was asked too, each
            ``allow`` or ``veto``.
        mirror_differences: Times the mirror differed from the runner's block table.
        checks: Calls into the core, and
        check_ns: the time they took with the Python around them, in nanoseconds.
    """

    steps: int = 0
    eligible: int = 0
    eligible_allowed: int = 0
    unsafe: Counter[str] = field(default_factory=Counter)
    reordered: int = 0
    requests_moved: int = 0
    vetoed: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    mirror_differences: int = 0
    checks: int = 0
    check_ns: int = 0
    demoted_requests: int = 0
    demoted_tokens: int = 0
    cut: int = 0
    unasked: int = 0
    verified: int = 0
    verify_findings: int = 0
    trace_ended: int = 0

    @property
    def num_vetoed(self) -> int:
        """Steps voted "no" on, for whatever reason."""
        return self.vetoed.total()

    def line(self) -> str:
        """The counts in one line, for a log."""
        parts = [
            f"{self.steps} steps",
            f"{self.eligible} eligible ({self.eligible_allowed} allowed)",
            f"unsafe: {_listed(self.unsafe)}",
            f"{self.reordered} reordered ({self.requests_moved} requests moved)",
            f"vetoed: {_listed(self.vetoed)}",
        ]
        if self.verdicts:
            disagreed = sum(count for (ours, theirs), count in self.verdicts.items() if ours != theirs)
            parts.append(f"vLLM disagreed in {disagreed} of {self.verdicts.total()}")
        if self.mirror_differences:
            parts.append(f"{self.mirror_differences} mirror differences")
        if self.checks:
            parts.append(f"{self.check_ns / self.checks / 1e3:.1f} us per check")
        return ", ".join(parts)

    def samples(self) -> dict[tuple[str, Labels], float]:
        """Metric name without prefix and label values -> value, as `CounterExport` exports it."""
        samples: dict[tuple[str, Labels], float] = {
            ("steps", ()): self.steps,
            ("eligible_steps", ()): self.eligible,
            ("eligible_steps_allowed", ()): self.eligible_allowed,
            ("reordered_steps", ()): self.reordered,
            ("requests_moved", ()): self.requests_moved,
            ("mirror_differences", ()): self.mirror_differences,
            ("checks", ()): self.checks,
            ("check_seconds", ()): self.check_ns / 1e9,
        }
        samples |= {("unsafe_steps", (kind,)): count for kind, count in self.unsafe.items()}
        samples |= {("vetoed_steps", (reason,)): count for reason, count in self.vetoed.items()}
        samples |= {("verdicts", pair): count for pair, count in self.verdicts.items()}
        return samples


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"


_METRICS: dict[str, tuple[str, Labels]] = {
    "steps": ("Steps voted on while the engine microbatches.", ()),
    "eligible_steps": ("Steps that the engine may cut.", ()),
    "eligible_steps_allowed": ("Eligible steps that the guard let be cut.", ()),
    "unsafe_steps": ("Steps with an unsafe cut as they came in, by kind of reader.", ("kind",)),
    "reordered_steps": ("Steps that were reordered.", ()),
    "requests_moved": ("Requests that changed places in reordered steps.", ()),
    "vetoed_steps": ("Steps that the guard voted to run whole, by reason.", ("reason",)),
    "verdicts": ("Verdicts of the guard and of vLLM's own, where both were asked.", ("guard", "vllm")),
    "mirror_differences": ("Times the mirror differed from the runner's block table.", ()),
    "checks": ("Calls into the core.", ()),
    "check_seconds": ("Time in the core and the Python around it.", ()),
}


class CounterExport:
    """Prometheus counters named ``ubatch_guard_*`` in ``registry`` (default: prometheus_client's own).

    Raises:
        ImportError: prometheus_client is not installed (``pip install ubatch-guard[metrics]``).
        ValueError: The registry has metrics of these names already.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        import prometheus_client

        self._metrics = {
            name: prometheus_client.Counter(
                f"ubatch_guard_{name}", text, labels, registry=registry or prometheus_client.REGISTRY
            )
            for name, (text, labels) in _METRICS.items()
        }

    def export(self, counters: Counters, exported: dict[tuple[str, Labels], float]) -> None:
        """Add what ``counters`` has gained over ``exported``, and bring ``exported`` up to date."""
        for (name, labels), value in counters.samples().items():
            gain = value - exported.get((name, labels), 0)
            if gain > 0:
                metric = self._metrics[name]
                (metric.labels(*labels) if labels else metric).inc(gain)
                exported[name, labels] = value


@functools.cache
def default_export() -> CounterExport | None:
    """The process's metrics in prometheus_client's own registry; None without prometheus_client."""
    try:
        return CounterExport()
    except ImportError:
        return None
