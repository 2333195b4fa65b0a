"""The policy: ask the core about a step; say whether it may be cut, and in which batch order."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from ubatch_guard._core import Checker, DtypeError, GuardError, Mirror, PhaseError, ShapeError
from ubatch_guard.cuts import as_cut, nearest_safe_cuts
from ubatch_guard.log import described
from ubatch_guard.step import (
    CutRange,
    KVCacheGroup,
    MirroredStep,
    Order,
    OrderConstraint,
    Phase,
    Policy,
    Reason,
    Step,
    UnsafeCuts,
    Verdict,
    feasible_cuts,
)

ALL_CUTS = CutRange(1, 2**31 - 1)
"""Every cut that a step can have."""


class Guard:
    """Exact guard for microbatched steps.

    A guard keeps scratch between calls and belongs to one thread at a time; a second one gets a `BusyError`.
    Long questions let other threads run, which must leave the arrays of the step as they are.

    What a question reads is checked. For a `Step` that is every column that a request reads or writes, but
    for the requests in front of the first that is not settled. The mirror checks ids when they come, and
    that a row is long enough where it comes upon its end.

    Args:
        groups: The engine's KV cache groups.
        policy: What to do about a step with an unsafe cut; a `Policy` or its value.
        num_ubatches: Microbatches of a split step, at least 2.

    Attributes:
        mirror: Block tables kept on the host for `MirroredStep`; feed it with the scheduler's changes.

    Raises:
        GroupError: A group that cannot be.
        AllocationError: A pool too large for this machine.
        ValueError: An unknown policy, or fewer than 2 microbatches.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        policy: Policy | str = Policy.REORDER,
        num_ubatches: int = 2,
    ) -> None:
        feasible_cuts(num_ubatches, num_ubatches)  # raises for fewer than 2
        self.groups = tuple(groups)
        self.policy = Policy(policy)
        self.num_ubatches = num_ubatches
        self.mirror = Mirror(self.groups)
        self._checker = Checker(self.groups)

    def is_safe(self, step: Step | MirroredStep, cuts: CutRange | None = None) -> bool:
        """Whether no cut among ``cuts`` is unsafe.

        Args:
            step: The step.
            cuts: The cuts asked about; None: those that the step can get, `feasible_cuts`.

        Raises:
            GuardError: Bad input, see its subclasses.
        """
        asked = feasible_cuts(step.num_tokens, self.num_ubatches) if cuts is None else cuts
        if isinstance(step, MirroredStep):
            return self.mirror.is_safe(
                step.slots,
                step.num_computed_tokens,
                step.num_scheduled_tokens,
                asked.first,
                asked.last,
                step.num_read_tokens,
                step.num_prompt_tokens,
            )
        self._same_groups(step)
        return self._checker.is_safe(
            step.block_tables,
            step.num_computed_tokens,
            step.num_scheduled_tokens,
            asked.first,
            asked.last,
            step.num_settled_tokens,
            step.num_read_tokens,
            step.num_prompt_tokens,
        )

    def unsafe_cuts(self, step: Step | MirroredStep, cuts: CutRange = ALL_CUTS) -> tuple[UnsafeCuts, ...]:
        """The unsafe cuts among ``cuts``: ascending, disjoint, none touching the next.

        Raises:
            GuardError: Bad input, see its subclasses.
        """
        if isinstance(step, MirroredStep):
            found = self.mirror.unsafe_cuts(
                step.slots,
                step.num_computed_tokens,
                step.num_scheduled_tokens,
                cuts.first,
                cuts.last,
                step.num_read_tokens,
                step.num_prompt_tokens,
            )
        else:
            self._same_groups(step)
            found = self._checker.unsafe_cuts(
                step.block_tables,
                step.num_computed_tokens,
                step.num_scheduled_tokens,
                cuts.first,
                cuts.last,
                step.num_settled_tokens,
                step.num_read_tokens,
                step.num_prompt_tokens,
            )
        return tuple(UnsafeCuts(*fields) for fields in found)

    def nearest_safe_cut(
        self,
        step: Step | MirroredStep,
        target: SupportsIndex,
        *,
        first: SupportsIndex | None = None,
        last: SupportsIndex | None = None,
        at_requests: bool = False,
    ) -> int | None:
        """The safe cut nearest to ``target``, the lower of two; None where there is none.

        For an engine that chooses its own cut: `nearest_safe_cuts` with one target.
        """
        found = self.nearest_safe_cuts(step, [target], first=first, last=last, at_requests=at_requests)
        return None if found is None else found[0]

    def nearest_safe_cuts(
        self,
        step: Step | MirroredStep,
        targets: Iterable[SupportsIndex],
        *,
        first: SupportsIndex | None = None,
        last: SupportsIndex | None = None,
        at_requests: bool = False,
    ) -> tuple[int, ...] | None:
        """The ascending safe cuts nearest to ``targets``, one for each; None where there are not so many.

        The step stays as it is, and every cut returned is safe in it. Of all choices the one whose largest
        distance to its target is least, of these the one whose summed distance is, of these the lowest.

        Args:
            step: The step, in its final order.
            targets: Wished cuts in tokens, strictly ascending, one fewer than microbatches; integers of any
                type. They may lie outside ``first .. last``.
            first: Lowest cut to choose; None: 1.
            last: Highest cut to choose; None: the last that leaves a token for the last microbatch.
            at_requests: Cut between requests only.

        Raises:
            GuardError: Targets that do not ascend, a cut that is no integer (`DtypeError`) or would leave a
                microbatch empty, or bad input, see its subclasses.
        """
        highest = step.num_tokens - 1
        cuts = CutRange(1 if first is None else as_cut(first), highest if last is None else as_cut(last))
        if cuts.first < 1 or cuts.last > highest:
            raise GuardError(f"no cuts {cuts.first} to {cuts.last}: those of the step are 1 to {highest}")
        unsafe = self.unsafe_cuts(step, cuts)
        ends = np.cumsum(step.num_scheduled_tokens, dtype=np.int64) if at_requests else None
        return nearest_safe_cuts(unsafe, targets, cuts, ends)

    def order(
        self,
        step: Step | MirroredStep,
        phases: Sequence[Phase] | npt.NDArray[np.integer] | None = None,
        constraint: OrderConstraint | str = OrderConstraint.FREE,
        short_query: int | None = None,
    ) -> Order | None:
        """A batch order with every writer before its readers, so without any unsafe cut.

        It moves few requests, and none when the batch has such an order already.

        Args:
            step: The step.
            phases: Phase of each request, in batch order; needed where ``constraint`` asks for phases.
            constraint: What the attention backends accept; an `OrderConstraint` or its value.
            short_query: Tokens up to which the backends take a query for a decode as long as no longer one
                stands before it (vLLM: ``reorder_batch_threshold``, ``decode_threshold``). Who leads now and
                needs no longer query's writes still leads in the order found: no order demotes fewer. None:
                it makes no difference who stands behind whom.

        Returns:
            The order, or None where there is none.

        Raises:
            GuardError: Bad input, see its subclasses.
            ValueError: An unknown constraint.
        """
        constraint = OrderConstraint(constraint)
        allowed = self._allowed_phases(step.num_reqs, phases, constraint)
        if isinstance(step, MirroredStep):
            found = self.mirror.order(
                step.slots,
                step.num_computed_tokens,
                step.num_scheduled_tokens,
                allowed,
                short_query,
                step.num_read_tokens,
                step.num_prompt_tokens,
            )
        else:
            self._same_groups(step)
            found = self._checker.order(
                step.block_tables,
                step.num_computed_tokens,
                step.num_scheduled_tokens,
                allowed,
                step.num_settled_tokens,
                short_query,
                step.num_read_tokens,
                step.num_prompt_tokens,
            )
        if found is None:
            return None
        permutation, swaps, demoted = found
        if swaps and constraint is OrderConstraint.FIXED:
            return None
        return Order(tuple(permutation), tuple(swaps), tuple(demoted))

    def decide(
        self,
        step: Step | MirroredStep,
        cuts: CutRange | SupportsIndex | Iterable[SupportsIndex] | None = None,
        *,
        phases: Sequence[Phase] | npt.NDArray[np.integer] | None = None,
        constraint: OrderConstraint | str = OrderConstraint.FREE,
        short_query: int | None = None,
        max_demoted_tokens: int | None = None,
    ) -> Verdict:
        """Whether the step may be cut, under the guard's policy.

        Args:
            step: The step.
            cuts: A range of cuts, one cut, or the cuts of a split, of any integer type; None: every cut that
                the step can get, `feasible_cuts`.
            phases: As for `order`.
            constraint: As for `order`.
            short_query: As for `order`.
            max_demoted_tokens: Above so many computed and scheduled tokens of demoted requests, an order is
                not worth it and the step runs whole. None: there is no bound. Without ``short_query`` nobody
                counts as demoted.

        Raises:
            GuardError: Bad input, see its subclasses. `vote` makes a verdict of this, and of all below.
            ValueError: An unknown constraint.
            TypeError: A cut that is no integer.
        """
        constraint = OrderConstraint(constraint)
        unsafe = self._unsafe_among(step, cuts)
        if not unsafe:
            return Verdict(True, Reason.SAFE)
        if self.policy is Policy.OBSERVE:
            return Verdict(True, Reason.OBSERVED, unsafe)
        if self.policy is Policy.VETO or constraint is OrderConstraint.FIXED:
            return Verdict(False, Reason.UNSAFE, unsafe)
        order = self.order(step, phases, constraint, short_query)
        if order is None:
            return Verdict(False, Reason.NO_ORDER, unsafe)
        counts = step.num_computed_tokens, step.num_scheduled_tokens
        if max_demoted_tokens is not None and order.num_demoted_tokens(*counts) > max_demoted_tokens:
            return Verdict(False, Reason.DEMOTES, unsafe)
        return Verdict(True, Reason.REORDERED, unsafe, order)

    def vote(
        self,
        step: Step | MirroredStep,
        cuts: CutRange | SupportsIndex | Iterable[SupportsIndex] | None = None,
        *,
        phases: Sequence[Phase] | npt.NDArray[np.integer] | None = None,
        constraint: OrderConstraint | str = OrderConstraint.FREE,
        short_query: int | None = None,
        max_demoted_tokens: int | None = None,
    ) -> Verdict:
        """As `decide`, for use inside a step: what cannot be decided is refused, and nothing is raised.

        An exception on one rank of a data-parallel engine leaves its peers waiting in the vote.
        """
        try:
            return self.decide(
                step,
                cuts,
                phases=phases,
                constraint=constraint,
                short_query=short_query,
                max_demoted_tokens=max_demoted_tokens,
            )
        except Exception as error:
            return Verdict(False, Reason.UNDECIDED, error=described(error))

    def _unsafe_among(
        self, step: Step | MirroredStep, cuts: CutRange | SupportsIndex | Iterable[SupportsIndex] | None
    ) -> tuple[UnsafeCuts, ...]:
        asked = feasible_cuts(step.num_tokens, self.num_ubatches) if cuts is None else _range_or_list(cuts)
        if isinstance(asked, CutRange):
            # Nearly every step is safe, and that answer is several times cheaper.
            return () if self.is_safe(step, asked) else self.unsafe_cuts(step, asked)
        return tuple(unsafe for unsafe in self.unsafe_cuts(step) if any(cut in unsafe for cut in asked))

    def _same_groups(self, step: Step) -> None:
        if tuple(step.groups) != self.groups:
            raise ShapeError(f"the step's groups {step.groups} are not the guard's {self.groups}")

    @staticmethod
    def _allowed_phases(
        num_reqs: int,
        phases: Sequence[Phase] | npt.NDArray[np.integer] | None,
        constraint: OrderConstraint,
    ) -> npt.NDArray[np.int8] | None:
        if constraint in (OrderConstraint.FREE, OrderConstraint.FIXED):
            return None
        if phases is None:
            raise PhaseError(f"the order constraint {constraint.value!r} needs the phases of the requests")
        given = np.asarray(phases)
        if given.shape != (num_reqs,):
            raise ShapeError(f"phases: shape {given.shape}, expected {(num_reqs,)}")
        if num_reqs and given.dtype.kind not in "iu":
            raise DtypeError(f"phases is {given.dtype}, expected integers")
        allowed = given.astype(np.int8)
        if not np.array_equal(allowed, given):
            request = int(np.flatnonzero(allowed != given)[0])
            raise PhaseError(f"phases[{request}] is {given[request]}; phases are 0, 1 and 2")
        if constraint is OrderConstraint.DECODES_LEAD:
            # Extends and prefills form one section.
            return np.where(allowed == Phase.EXTEND, np.int8(Phase.PREFILL), allowed)
        return allowed


def _range_or_list(cuts: CutRange | SupportsIndex | Iterable[SupportsIndex]) -> CutRange | list[int]:
    """The cuts asked about; what comes one by one is read once."""
    if isinstance(cuts, CutRange):
        return cuts
    try:
        # An array has `__index__` too, which refuses but for a single integer.
        cut = operator.index(cuts)  # type: ignore[arg-type]
    except TypeError:
        return [operator.index(cut) for cut in cuts]  # type: ignore[union-attr]
    return CutRange(cut, cut)
