"""The Rust core. Use :mod:`ubatch_guard`; this module is private."""

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from ubatch_guard.step import IntArray, KVCacheGroup

__all__ = [
    "AllocationError",
    "BlockIdError",
    "BusyError",
    "Checker",
    "DtypeError",
    "DuplicateRequestError",
    "GroupError",
    "GuardError",
    "InternalError",
    "Mirror",
    "PhaseError",
    "ShapeError",
    "TokenCountError",
    "UnknownRequestError",
    "__version__",
    "_read_floor",
]

__version__: str

class GuardError(ValueError):
    """Input that the guard cannot decide on; the message has the values."""

class DtypeError(GuardError):
    """An array is neither int32 nor int64."""

class ShapeError(GuardError):
    """Lengths or dimensions that disagree, or a block table row shorter than its request needs."""

class TokenCountError(GuardError):
    """A negative token count, or counts whose sum does not fit."""

class BlockIdError(GuardError):
    """A block id outside its pool."""

class GroupError(GuardError):
    """A KV cache group that cannot be: no tokens per column, a window of 0, and the like."""

class PhaseError(GuardError):
    """A phase that is none of 0, 1, 2, or phases that are missing."""

class UnknownRequestError(GuardError):
    """A request id or slot the mirror has no row for."""

class DuplicateRequestError(GuardError):
    """A request id that the mirror holds already, or that stands twice in a batch."""

class AllocationError(GuardError):
    """Memory that could not be had, for a pool or a row that is too large; nothing has changed."""

class BusyError(GuardError):
    """The object is in use: by another thread, or by the very call whose arguments call it."""

class InternalError(RuntimeError):
    """A defect of the guard itself."""

# (first, last, reader, writer, group, block)
_Unsafe = tuple[int, int, int, int, int, int]
# (permutation, swaps, demoted)
_Order = tuple[list[int], list[tuple[int, int]], list[int]]

@final
class Checker:
    """Stateless check over numpy block tables; keeps scratch between calls."""
    def __new__(cls, groups: Sequence[KVCacheGroup]) -> Checker: ...
    def is_safe(
        self,
        block_tables: Sequence[IntArray],
        num_computed_tokens: IntArray,
        num_scheduled_tokens: IntArray,
        first_cut: int | None = None,
        last_cut: int | None = None,
        num_settled_tokens: IntArray | None = None,
        num_read_tokens: IntArray | None = None,
        num_prompt_tokens: IntArray | None = None,
    ) -> bool:
        """Whether no cut in ``first_cut .. last_cut`` (default: any cut of the step) is unsafe."""
    def unsafe_cuts(
        self,
        block_tables: Sequence[IntArray],
        num_computed_tokens: IntArray,
        num_scheduled_tokens: IntArray,
        first_cut: int | None = None,
        last_cut: int | None = None,
        num_settled_tokens: IntArray | None = None,
        num_read_tokens: IntArray | None = None,
        num_prompt_tokens: IntArray | None = None,
    ) -> list[_Unsafe]:
        """The unsafe cuts, clipped to ``first_cut .. last_cut``, ascending and disjoint."""
    def order(
        self,
        block_tables: Sequence[IntArray],
        num_computed_tokens: IntArray,
        num_scheduled_tokens: IntArray,
        phases: npt.NDArray[np.int8] | None = None,
        num_settled_tokens: IntArray | None = None,
        short_query: int | None = None,
        num_read_tokens: IntArray | None = None,
        num_prompt_tokens: IntArray | None = None,
    ) -> _Order | None:
        """A batch order without unsafe cuts whose phases do not descend, or None.

        Of the queries of at most ``short_query`` tokens that stand before the first longer one, those that
        need no longer one's writes still do.
        """

@final
class Mirror:
    """Block tables of the live requests on the host, with a count per block of the rows that hold it."""
    def __new__(cls, groups: Sequence[KVCacheGroup]) -> Mirror: ...
    def __len__(self) -> int: ...
    def __contains__(self, request_id: object, /) -> bool: ...
    @property
    def nbytes(self) -> int:
        """Bytes of heap memory held."""
    def add(self, request_id: str, rows: Sequence[Sequence[int] | IntArray]) -> None:
        """A new request with one row of block ids per group."""
    def replace(self, request_id: str, rows: Sequence[Sequence[int] | IntArray]) -> None:
        """Give a known request new rows."""
    def append(self, request_id: str, rows: Sequence[Sequence[int] | IntArray]) -> None:
        """Add blocks to the ends of a request's rows."""
    def append_each(
        self, request_ids: Sequence[str], rows: Sequence[Sequence[Sequence[int] | IntArray] | None]
    ) -> None:
        """`append` for a whole step, in the form of vLLM's ``CachedRequestData.new_block_ids``.

        All of it or, with an error, none.
        """
    def free(self, request_id: str) -> None:
        """The request's rows go."""
    def clear(self) -> None:
        """All rows go."""
    def slots(self, request_ids: Sequence[str], *, missing: bool = False) -> npt.NDArray[np.int32]:
        """int32, shape ``[len(request_ids)]``: the handles that the questions below take, in batch order.

        A request without a row raises `UnknownRequestError`, or has the slot -1 with ``missing``. Such a one
        concerns no other, but its tokens take room: they move the offsets of those behind it.
        """
    def row(self, request_id: str, group: int) -> npt.NDArray[np.int32]:
        """int32, shape ``[columns]``: a copy of a request's row."""
    def is_safe(
        self,
        slots: npt.NDArray[np.int32],
        num_computed_tokens: IntArray,
        num_scheduled_tokens: IntArray,
        first_cut: int | None = None,
        last_cut: int | None = None,
        num_read_tokens: IntArray | None = None,
        num_prompt_tokens: IntArray | None = None,
    ) -> bool:
        """As `Checker.is_safe`, at one look per written block."""
    def unsafe_cuts(
        self,
        slots: npt.NDArray[np.int32],
        num_computed_tokens: IntArray,
        num_scheduled_tokens: IntArray,
        first_cut: int | None = None,
        last_cut: int | None = None,
        num_read_tokens: IntArray | None = None,
        num_prompt_tokens: IntArray | None = None,
    ) -> list[_Unsafe]:
        """As `Checker.unsafe_cuts`."""
    def order(
        self,
        slots: npt.NDArray[np.int32],
        num_computed_tokens: IntArray,
        num_scheduled_tokens: IntArray,
        phases: npt.NDArray[np.int8] | None = None,
        short_query: int | None = None,
        num_read_tokens: IntArray | None = None,
        num_prompt_tokens: IntArray | None = None,
    ) -> _Order | None:
        """As `Checker.order`."""
    def first_difference(
        self, slots: npt.NDArray[np.int32], group: int, block_table: IntArray, num_blocks_per_row: IntArray
    ) -> tuple[int, int] | None:
        """Where an engine's own block table disagrees: ``(batch position, column)``, or None.

        Column is the shorter length where one row is a prefix of the other.
        """

def _read_floor(rows: npt.NDArray[np.int32]) -> int:
    """Read rows of block ids once and add them up: the floor that `ubatch_guard.bench` compares with."""
