"""Exact guard for microbatched LLM inference with prefix caching.

`Guard` answers for one step; `ubatch_guard.runner_mixin.UBatchGuardMixin` guards an engine's model runner.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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


def __getattr__(name: str) -> Any:
    """Load what is asked for, so that the command line meets an interrupt while numpy is loaded."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    for home in ("_core", "step", "guard"):
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AssertionError(f"{name} is in no module")


def __dir__() -> list[str]:
    return __all__
