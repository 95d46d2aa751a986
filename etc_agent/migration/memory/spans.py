"""Which tensors lie in the memory of which others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch

from etc_agent.state.layout import Shard


class Spans:
    """The memory that the tensors of some shards take: of each, the addresses from its first to its last byte. Gaps
    between the elements of a strided tensor count as taken."""

    def __init__(self, tensors: Iterable[tuple[Shard, torch.Tensor]]) -> None:
        spans = sorted((*span_of(tensor), shard) for shard, tensor in tensors if tensor.numel())
        self._starts = [start for start, _, _ in spans]
        # Entry i: of the first i + 1 spans, the one that reaches furthest.
        self._furthest: list[tuple[int, Shard]] = []
        for _, end, shard in spans:
            furthest = self._furthest[-1] if self._furthest else (0, shard)
            self._furthest.append(max((end, shard), furthest, key=lambda reach: reach[0]))

    def overlapping(self, tensor: torch.Tensor) -> Shard | None:
        """A shard whose memory `tensor` shares bytes with, None where there is none."""
        if not tensor.numel():
            return None
        start, end = span_of(tensor)
        before = bisect_left(self._starts, end)
        if before and self._furthest[before - 1][0] > start:
            return self._furthest[before - 1][1]
        return None


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one behind its last."""
    start = tensor.data_ptr()
    return start, start + reach_bytes(tensor)


def reach_bytes(tensor: torch.Tensor) -> int:
    """From a tensor's first byte to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the storages that some tensors are in, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def is_backed(tensor: torch.Tensor) -> bool:
    """Whether the storage of a tensor still has all of its bytes: `UntypedStorage.resize_` may have taken some away."""
    end_bytes = tensor.storage_offset() * tensor.element_size() + reach_bytes(tensor)
    return tensor.untyped_storage().nbytes() >= end_bytes
