"""Which tensors lie in the memory of which others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch

from etc_agent.state.layout import Shard


class Spans:
    """The address ranges of the tensors of some shards, each from its first to its last byte. Gaps between the elements
    of a strided tensor count as used."""

    def __init__(self, tensors: Iterable[tuple[Shard, torch.Tensor]]) -> None:
        spans = sorted((*span_of(tensor), shard) for shard, tensor in tensors if tensor.numel())
        self._starts = [start for start, _, _ in spans]
        # Entry i: among the first i + 1 ranges, the one that ends last.
        self._furthest: list[tuple[int, Shard]] = []
        for _, end, shard in spans:
            furthest = self._furthest[-1] if self._furthest else (0, shard)
            self._furthest.append(max((end, shard), furthest, key=lambda reach: reach[0]))

    def overlapping(self, tensor: torch.Tensor) -> Shard | None:
        """A shard whose memory overlaps that of `tensor`, or None."""
        if not tensor.numel():
            return None
        start, end = span_of(tensor)
        before = bisect_left(self._starts, end)
        if before and self._furthest[before - 1][0] > start:
            return self._furthest[before - 1][1]
        return None


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the address after its last byte."""
    start = tensor.data_ptr()
    return start, start + reach_bytes(tensor)


def reach_bytes(tensor: torch.Tensor) -> int:
    """From a tensor's first byte to after its last byte, in bytes."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The total size of the storages under `tensors`, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def is_backed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage still covers all of its bytes: `UntypedStorage.resize_` may have shrunk it."""
    end_bytes = tensor.storage_offset() * tensor.element_size() + reach_bytes(tensor)
    return tensor.untyped_storage().nbytes() >= end_bytes
