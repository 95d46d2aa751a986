"""Reuses pages of old host tensors for new ones in `release` mode, instead of freeing and allocating them.

Freeing a page and faulting in a new one costs more than copying its bytes over loopback. `mremap` moves pages to the
addresses of a new tensor (`Mapped`) and leaves the old addresses mapped but empty. Where it refuses, the old pages are
freed and new ones are allocated by page faults.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from etc_agent.migration.memory.pages import Range, can_map, discard, mapped_ranges, move_pages
from etc_agent.torch_private.tensors import number_of

_SMALLEST_MOVE_BYTES = 64 << 10
"""Smaller pieces are not moved: a move costs a system call and a separate mapping in the kernel."""


class PagePool:
    """Pages that an old tensor has released and that no new tensor has taken yet. They count as held: `num_bytes`.

    Create it after all tensors that it will be offered: it reads once in which mapping each of them lies.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._ranges = mapped_ranges() if can_map else []
        self._starts = [each.start for each in self._ranges]
        self._pool: deque[tuple[torch.UntypedStorage, int, int]] = deque()
        self._carried: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def can_move(self, storage: torch.UntypedStorage) -> bool:
        """Whether the pages of a host storage are private to this process."""
        # After a move, pages of a shared file would be in both places, and pages of a named file would keep its bytes.
        return all(each.is_private for each in self._ranges_of(storage))

    def is_file(self, storage: torch.UntypedStorage) -> bool:
        """Whether a host storage is a mapped file, which others may still need."""
        return any(each.is_file for each in self._ranges_of(storage))

    def _ranges_of(self, storage: torch.UntypedStorage) -> list[Range]:
        first = max(0, bisect_right(self._starts, storage.data_ptr()) - 1)
        last = bisect_left(self._starts, storage.data_ptr() + storage.nbytes())
        return [each for each in self._ranges[first:last] if each.end > storage.data_ptr()]

    def carry(self, storage: torch.UntypedStorage, start: int, size: int, to: int) -> tuple[int, int]:
        """Move the whole pages among the `size` bytes at address `start` inside `storage` to where they belong when
        `start` maps to address `to`, which has the same offset within its page. They leave what the storage offers.

        Returns:
            The bytes before the first whole page, and the bytes moved.
        """
        first, last = _whole_pages(start, size)
        at = first
        while last - at >= _SMALLEST_MOVE_BYTES and (moved := _move(at, to + at - start, last - at)):
            at += moved
        if at > first:
            self._carried[number_of(storage)].append((first, at))
        return first - start, at - first

    def offer(self, tensor: torch.Tensor, wanted_bytes: int) -> int:
        """Take away the memory of the tensor's whole storage, whoever else refers to it.

        Args:
            wanted_bytes: how much new tensors can still use; pages beyond that are freed.

        Returns:
            The storage's size in bytes, less what was carried away.
        """
        storage = tensor.untyped_storage()
        size, start = storage.nbytes(), storage.data_ptr()
        if tensor.device.type != "cpu" or tensor.is_pinned():
            storage.resize_(0)
            return size
        carried = sorted(self._carried.pop(number_of(storage), ()))
        ranges = _between(_whole_pages(start, size), carried)
        left = [(first, last) for first, last in ranges if last - first >= _SMALLEST_MOVE_BYTES]
        left_bytes = sum(last - first for first, last in left)
        if left and self.can_move(storage) and self.num_bytes + left_bytes <= wanted_bytes:
            self._pool += [(storage, first, last) for first, last in left]
            self.num_bytes += left_bytes
        else:
            _release(storage)
        return size - sum(last - first for first, last in carried)

    def fill(self, start: int, end: int) -> None:
        """Put pages under the addresses from `start` to before `end`, page-aligned, that have none yet."""
        at, end = start, end // mmap.PAGESIZE * mmap.PAGESIZE
        while self._pool and end - at >= _SMALLEST_MOVE_BYTES:
            storage, first, last = self._pool.popleft()
            size = _move(first, at, min(end - at, last - first))
            if not size:
                size = last - first
                discard(first, size)
            else:
                at += size
            self.num_bytes -= size
            if last - first - size >= _SMALLEST_MOVE_BYTES:
                self._pool.appendleft((storage, first + size, last))
            else:
                self.num_bytes -= last - first - size
                discard(first + size, last - first - size)
                self._drop(storage)

    def shrink(self, limit_bytes: int) -> None:
        """Free pages until at most `limit_bytes` are left."""
        while self._pool and self.num_bytes > limit_bytes:
            storage, first, last = self._pool.pop()
            discard(first, last - first)
            self.num_bytes -= last - first
            self._drop(storage)

    def _drop(self, storage: torch.UntypedStorage) -> None:
        """Free a storage when the last of its ranges has been used."""
        if all(other is not storage for other, _, _ in self._pool):
            _release(storage)


def _move(source: int, target: int, size: int) -> int:
    """Move as many of the first pages of `size` bytes as one call can; returns how many bytes were moved."""
    # A range that earlier moves have put together can only be moved in the pieces that it was made of.
    while not move_pages(source, target, size):
        if size < 2 * _SMALLEST_MOVE_BYTES:
            return 0
        size = size // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    return size


def _whole_pages(start: int, size: int) -> tuple[int, int]:
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE


def _between(outer: tuple[int, int], holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """`outer` without `holes`, which are sorted and disjoint."""
    ends = [outer[0], *(last for _, last in holes)]
    return list(zip(ends, [*(first for first, _ in holes), outer[1]], strict=True))


def _release(storage: torch.UntypedStorage) -> None:
    """Free a host storage's memory, except pages that were moved away."""
    # Without this the allocator would keep the pages of every storage that it has not mapped separately.
    discard(storage.data_ptr(), storage.nbytes())
    if storage.resizable():  # not so for memory of `Mapped`, or shared with numpy
        storage.resize_(0)
