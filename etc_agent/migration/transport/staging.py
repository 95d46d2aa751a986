"""Buffers between tensors and the wire, for what cannot travel in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etc_agent.migration.memory.bits import touch


class Staging:
    """As many slots as there are rounds in flight; round r uses slot ``r % window``.

    Args:
        needs_bytes: staging bytes of each round.
        window: rounds in flight together.
        device: where the slots live; host memory is pinned if `pinned`.
    """

    def __init__(self, needs_bytes: Sequence[int], window: int, device: torch.device, *, pinned: bool) -> None:
        sizes = [max(needs_bytes[slot::window], default=0) for slot in range(window)]
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned) for size in sizes]
        for buffer in self._slots:
            touch(buffer)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._slots)

    def fits(self, needs_bytes: Sequence[int]) -> bool:
        window = len(self._slots)
        return all(need <= self._slots[number % window].numel() for number, need in enumerate(needs_bytes))

    def slot(self, round_number: int) -> torch.Tensor:
        """The flat uint8 buffer of a round."""
        return self._slots[round_number % len(self._slots)]
