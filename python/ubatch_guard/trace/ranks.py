"""What the counts of one rank mean for many.

With data parallelism, microbatching is collective: a step is cut on every rank or on none, so one rank that
refuses stops all. The ranks are taken to stand at independent places of the audited steps. Averaged over all
such places, a share of one rank becomes its power: exactly, not as a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ubatch_guard.trace.audit import TraceAudit

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""The numbers of ranks in a table."""


@dataclass(frozen=True, slots=True)
class RankShares:
    """Shares, from 0 to 1, of the steps that are eligible on every rank.

    Attributes:
        ranks: Number of data-parallel ranks.
        engine_kept: Cut under vLLM's rule of 0.28 to 0.33.
        veto_kept: Cut by a guard that runs unsafe steps whole.
        kept: Cut by this guard under the policy of the audit.
        unsafe_unguarded: Cut without any rule (vLLM 0.34), and unsafe at the cut on at least one rank.
        unsafe_engine: The same under vLLM's rule of 0.28 to 0.33.
    """

    ranks: int
    engine_kept: float
    veto_kept: float
    kept: float
    unsafe_unguarded: float
    unsafe_engine: float


def rank_shares(audits: Sequence[TraceAudit], ranks: int) -> RankShares | None:
    """The shares for a number of ranks; None where no step is eligible.

    Args:
        audits: Counts of the traces that each rank goes through.
        ranks: Number of data-parallel ranks, at least 1.
    """
    eligible = sum(audit.eligible for audit in audits)
    if not eligible:
        return None

    def share(steps: int) -> float:
        return float((steps / eligible) ** ranks)

    hazardous = sum(audit.hazardous for audit in audits)
    any_cut = sum(audit.hazardous_any_cut for audit in audits)
    let_through = eligible - sum(audit.engine_vetoed for audit in audits)
    missed = sum(audit.engine_missed for audit in audits)
    return RankShares(
        ranks=ranks,
        engine_kept=share(let_through),
        veto_kept=share(eligible - any_cut),
        kept=share(sum(audit.kept for audit in audits)),
        unsafe_unguarded=1.0 - share(eligible - hazardous),
        # All ranks let it through, less all ranks let a safe one through.
        unsafe_engine=share(let_through) - share(let_through - missed),
    )
