"""Exact guard for microbatched LLM inference with prefix caching.

`Guard` answers for one step; `ubatch_guard.runner_mixin.UBatchGuardMixin` guards an engine's model runner.
"""

from ubatch_guard._core import (
    AllocationError,
    BlockIdError,
    BusyError,
    DtypeError,
    DuplicateRequestError,
    GroupError,
    GuardError,
    InternalError,
    Mirror,
    PhaseError,
    ShapeError,
    TokenCountError,
    UnknownRequestError,
    __version__,
)
from ubatch_guard.guard import Guard
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

__all__ = [
    "AllocationError",
    "BlockIdError",
    "BusyError",
    "CutRange",
    "DtypeError",
    "DuplicateRequestError",
    "GroupError",
    "Guard",
    "GuardError",
    "InternalError",
    "KVCacheGroup",
    "Mirror",
    "MirroredStep",
    "Order",
    "OrderConstraint",
    "Phase",
    "PhaseError",
    "Policy",
    "Reason",
    "ShapeError",
    "Step",
    "TokenCountError",
    "UnknownRequestError",
    "UnsafeCuts",
    "Verdict",
    "__version__",
    "feasible_cuts",
]
