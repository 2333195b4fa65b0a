"""Reports every attention read of a KV slot that the running step has still to write.

It knows nothing of the guard, of block tables or of cuts: before a step it marks the slots the step will
write, the cache's write kernel takes the marks away as it runs, and every read looks for marks. On a GPU
the marks live on the device and change in stream order, so what is reported is what the kernels saw.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class UnwrittenRead:
    """A request attended to a slot before it was written.

    Attributes:
        layer: Index of the layer.
        block: Id of the KV block.
        position: Token position in the request.
    """

    req_id: str
    layer: int
    block: int
    position: int


class Sanitizer:
    """Watches the KV cache of all layers for one step at a time."""

    def __init__(self, num_layers: int, num_slots: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._unwritten = torch.zeros(num_layers, num_slots, dtype=torch.bool, device=device)
        self._reads: list[tuple[str, int, int, Tensor, Tensor]] = []

    def begin_step(self, slots_by_layer: list[Tensor]) -> None:
        """The step will write these slots.

        Args:
            slots_by_layer: Per layer int64, shape ``[num_tokens]``.
        """
        self._unwritten.zero_()
        self._reads.clear()
        for layer, slots in enumerate(slots_by_layer):
            self._unwritten[layer, slots] = True

    def on_write(self, layer: int, slots: Tensor) -> None:
        """The write kernel of a layer has run for these slots (int64, shape ``[num_tokens]``)."""
        self._unwritten[layer, slots] = False

    def on_read(self, layer: int, req_id: str, first_position: int, slots: Tensor) -> None:
        """A request attends to these slots (int64), which hold its positions from ``first_position`` on."""
        self._reads.append((req_id, layer, first_position, slots, self._unwritten[layer, slots]))

    def end_step(self) -> list[UnwrittenRead]:
        """The reads of the step that came too early, in the order they were made; waits for the device."""
        reports = []
        for req_id, layer, first_position, slots, unwritten in self._reads:
            for index in unwritten.nonzero().flatten().tolist():
                block = int(slots[index]) // self._block_size
                reports.append(UnwrittenRead(req_id, layer, block, first_position + index))
        self._reads.clear()
        return reports
