"""What a guard has seen and done: plain counts, a log line, and Prometheus metrics.

Counting in a step is integer arithmetic; Prometheus gets the difference now and then (`GuardExport`), so that
its locks and files stay out of the step. In prometheus_client's multiprocess mode
(``PROMETHEUS_MULTIPROC_DIR``) the counts of worker processes reach the process that serves ``/metrics``.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ubatch_guard.log import described, say

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
        cut: Steps really cut, after the ranks' vote.
        unasked: Steps that were observed and never voted on.
        unsafe: Steps with an unsafe cut in the order they came in, by the kind of reader: ``running`` (ran
            before this step: a failed KV load), ``short`` (as short as a decode: vLLM's guard overlooks
            it), ``long``.
        reordered: Steps that were reordered.
        requests_moved: Requests that changed places, over all of these.
        demoted_requests: Requests that a reordering took out of the engine's decodes, and
        demoted_tokens: their context, in tokens.
        vetoed: Steps voted "no" on, by reason: ``unsafe``, ``no_order``, or why the step could not be
            decided.
        verdicts: ``(guard, vllm)`` verdicts of the steps in which vLLM's guard was asked too, each
            ``allow`` or ``veto``.
        mirror_differences: Times the mirror differed from the runner's block table.
        verified: Steps checked at the cut itself, and
        verify_findings: those of them in which a microbatch read what a later one writes.
        poison_reads: Requests that read a slot that nobody wrote (``UBATCH_GUARD_POISON``).
        trace_ended: Step traces that ended before their worker did.
        checks: Calls into the core, and
        check_ns: the time they took with the Python around them, in nanoseconds.
    """

    steps: int = 0
    eligible: int = 0
    eligible_allowed: int = 0
    cut: int = 0
    unasked: int = 0
    unsafe: Counter[str] = field(default_factory=Counter)
    reordered: int = 0
    requests_moved: int = 0
    demoted_requests: int = 0
    demoted_tokens: int = 0
    vetoed: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    mirror_differences: int = 0
    verified: int = 0
    verify_findings: int = 0
    poison_reads: int = 0
    trace_ended: int = 0
    checks: int = 0
    check_ns: int = 0

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
            f"{self.cut} really cut",
        ]
        if self.demoted_requests:
            parts.append(f"{self.demoted_requests} demoted ({self.demoted_tokens} tokens)")
        if self.unasked:
            parts.append(f"{self.unasked} never voted on")
        if self.verdicts:
            disagreed = sum(count for (ours, theirs), count in self.verdicts.items() if ours != theirs)
            parts.append(f"vLLM disagreed in {disagreed} of {self.verdicts.total()}")
        if self.mirror_differences:
            parts.append(f"{self.mirror_differences} mirror differences")
        if self.verified:
            parts.append(f"{self.verify_findings} findings in {self.verified} verified")
        if self.poison_reads:
            parts.append(f"{self.poison_reads} poison reads")
        if self.trace_ended:
            parts.append(f"{self.trace_ended} traces ended")
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
            ("cut_steps", ()): self.cut,
            ("unasked_steps", ()): self.unasked,
            ("demoted_requests", ()): self.demoted_requests,
            ("demoted_tokens", ()): self.demoted_tokens,
            ("mirror_differences", ()): self.mirror_differences,
            ("verified_steps", ()): self.verified,
            ("verify_findings", ()): self.verify_findings,
            ("poison_reads", ()): self.poison_reads,
            ("trace_ends", ()): self.trace_ended,
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
    "cut_steps": ("Steps really cut, after the ranks' vote.", ()),
    "unasked_steps": ("Steps that were observed and never voted on.", ()),
    "demoted_requests": ("Requests that a reordering took out of the engine's decodes.", ()),
    "demoted_tokens": ("Their context, in tokens.", ()),
    "mirror_differences": ("Times the mirror differed from the runner's block table.", ()),
    "verified_steps": ("Steps checked at the cut itself.", ()),
    "verify_findings": ("Verified steps in which a microbatch read what a later one writes.", ()),
    "poison_reads": ("Requests that read a slot that nobody wrote, where poison is on.", ()),
    "trace_ends": ("Step traces that ended before their worker did.", ()),
    "checks": ("Calls into the core.", ()),
    "check_seconds": ("Time in the core and the Python around it.", ()),
}


@dataclass(frozen=True, slots=True)
class Info:
    """What a worker's guard is, as the labels of the gauge ``ubatch_guard_info``.

    Attributes:
        version: Of this package.
        mode: The policy in force.
        runner: The runner's kind.
        guarded: ``yes``, or why not.
    """

    version: str
    mode: str
    runner: str
    guarded: str


class CounterExport:
    """Prometheus metrics named ``ubatch_guard_*`` in ``registry`` (default: prometheus_client's own).

    Raises:
        ImportError: prometheus_client is not installed (``pip install ubatch-guard[metrics]``).
        ValueError: The registry has metrics of these names already.
        OSError: The folder of the multiprocess mode is not there.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        import prometheus_client

        home = registry or prometheus_client.REGISTRY
        made: list[Any] = []
        try:
            self._metrics = {}
            for name, (text, labels) in _METRICS.items():
                metric = prometheus_client.Counter(f"ubatch_guard_{name}", text, labels, registry=home)
                made.append(metric)
                self._metrics[name] = metric
            self._info = prometheus_client.Gauge(
                "ubatch_guard_info",
                "1 for each live worker, with what its guard is.",
                [label.name for label in fields(Info)],
                registry=home,
                # A series per worker that is alive, so that one that differs is seen.
                multiprocess_mode="liveall",
            )
        except Exception:
            # Half of them would be in the way of whoever made the others.
            for metric in made:
                with contextlib.suppress(KeyError):
                    home.unregister(metric)
            raise

    def export(self, counters: Counters, exported: dict[tuple[str, Labels], float]) -> None:
        """Add what ``counters`` has gained over ``exported``, and bring ``exported`` up to date."""
        for (name, labels), value in counters.samples().items():
            gain = value - exported.get((name, labels), 0)
            if gain > 0:
                metric = self._metrics[name]
                (metric.labels(*labels) if labels else metric).inc(gain)
                exported[name, labels] = value

    def set_info(self, info: Info | None, before: Info | None) -> None:
        """Say what the guard is now (None: there is none), and that it is no more what it was."""
        if before is not None:
            self._info.labels(*astuple(before)).set(0)
        if info is not None:
            self._info.labels(*astuple(info)).set(1)


@functools.cache
def default_export() -> CounterExport | None:
    """The process's metrics in prometheus_client's own registry; None where they cannot be made.

    Raises nothing; that prometheus_client is not installed is no matter, anything else is logged once.
    """
    try:
        return CounterExport()
    except ImportError:
        return None
    except Exception as error:
        say(f"ubatch-guard: no metrics are exported ({described(error)})")
        return None


class GuardExport:
    """Exports one guard's counts. Never raises: what goes wrong ends it for good, with one line in the log.

    Args:
        info: What the guard is; may be set anew.
        make: What gives the metrics, asked at the first export.
    """

    def __init__(
        self, info: Info | None = None, make: Callable[[], CounterExport | None] = default_export
    ) -> None:
        self.info = info
        self._make: Callable[[], CounterExport | None] | None = make
        self._metrics: CounterExport | None = None
        self._exported: dict[tuple[str, Labels], float] = {}
        self._exported_info: Info | None = None

    def __call__(self, counters: Counters) -> None:
        """Add what ``counters`` has gained since the last call."""
        try:
            if self._make is not None:
                make, self._make = self._make, None
                self._metrics = make()
            if self._metrics is None:
                return
            self._metrics.export(counters, self._exported)
            if self.info != self._exported_info:
                self._metrics.set_info(self.info, self._exported_info)
                self._exported_info = self.info
        except Exception as error:
            self._metrics = None
            say(f"ubatch-guard: no metrics are exported any more ({described(error)})")
