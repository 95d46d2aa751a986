"""Pages of old host tensors put under new ones, so that the kernel need neither clear nor fault them (`release` mode).

A page that goes back to the kernel and another that comes from it cost more than the copy of its bytes over loopback.
`mremap` moves pages to the addresses of a new tensor (`Mapped`) and leaves the old addresses mapped, empty. Where it
refuses, pages go back and fresh ones come by faults, as without it.
"""

from __future__ import annotations

import mmap
from collections import deque

import torch

from etc_agent.migration.pages import can_map, discard, move_pages, shared_ranges

_SMALLEST_MOVE_BYTES = 64 << 10
"""A system call and a range of addresses of its own for the kernel to keep: not for less than this."""


class SparePages:
    """Pages between their old and their new tensor. They count as held: `num_bytes`.

    Made after all tensors that it will be offered: it looks up which memory is shared when it is made.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        # Pages of a shared file would be in both places after a move.
        self._shared = shared_ranges() if can_map else []
        self._spare: deque[tuple[torch.UntypedStorage, int, int]] = deque()

    def offer(self, tensor: torch.Tensor, wanted_bytes: int) -> int:
        """Take the memory of the tensor's whole storage away, from whoever else refers to it.

        Args:
            wanted_bytes: what may still be filled; more is not kept.

        Returns:
            The storage's bytes.
        """
        storage = tensor.untyped_storage()
        size, start = storage.nbytes(), storage.data_ptr()
        if tensor.device.type != "cpu" or tensor.is_pinned():
            storage.resize_(0)
            return size
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        is_movable = not any(begin < last and first < end for begin, end in self._shared)
        if is_movable and last - first >= _SMALLEST_MOVE_BYTES and self.num_bytes + last - first <= wanted_bytes:
            self._spare.append((storage, first, last))
            self.num_bytes += last - first
        else:
            _release(storage)
        return size

    def fill(self, tensor: torch.Tensor) -> None:
        """Put pages under a tensor whose own pages are its alone, and not there yet."""
        at, end = tensor.data_ptr(), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if at % mmap.PAGESIZE:
            return
        while self._spare and end - at >= _SMALLEST_MOVE_BYTES:
            storage, first, last = self._spare.popleft()
            size = min(end - at, last - first)
            # A range that was put together by earlier moves can only be moved in the pieces that it is made of.
            while not (moved := move_pages(first, at, size)) and size >= 2 * _SMALLEST_MOVE_BYTES:
                size = size // 2 // mmap.PAGESIZE * mmap.PAGESIZE
            if not moved:
                size = last - first
                discard(first, size)
            else:
                at += size
            self.num_bytes -= size
            if last - first - size >= _SMALLEST_MOVE_BYTES:
                self._spare.appendleft((storage, first + size, last))
            else:
                self.num_bytes -= last - first - size
                _release(storage)

    def clear(self) -> None:
        """Give back what is left."""
        while self._spare:
            _release(self._spare.pop()[0])
        self.num_bytes = 0


def _release(storage: torch.UntypedStorage) -> None:
    """Give a host storage's memory back; what was moved away is not there any more."""
    # The allocator would keep the pages of all that it does not map by itself.
    discard(storage.data_ptr(), storage.nbytes())
    if storage.resizable():  # unlike what `Mapped` gave, or what numpy has seen
        storage.resize_(0)
