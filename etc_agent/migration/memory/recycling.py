"""Pages of old host tensors used again for new ones in `release` mode, instead of going through the kernel.

To return a page to the kernel and fault a fresh one in costs more than to copy its bytes over loopback. `mremap` moves
pages to the addresses of a new tensor (`Mapped`) and leaves the old addresses mapped, empty. Where it refuses, the old
pages are returned and fresh ones come by faults.
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
"""A system call and a range of addresses of its own for the kernel to keep: not for less than this."""


class PagePool:
    """Pages that an old tensor has released and that no new tensor has taken yet. They count as held: `num_bytes`.

    Make it after all tensors that it will be offered: it looks up once in what memory each of them lies.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._ranges = mapped_ranges() if can_map else []
        self._starts = [each.start for each in self._ranges]
        self._pool: deque[tuple[torch.UntypedStorage, int, int]] = deque()
        self._carried: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def can_move(self, storage: torch.UntypedStorage) -> bool:
        """Whether the pages of a host storage are this process's alone."""
        # Pages of a shared file would be in both places after a move, those of a file would bring its bytes along.
        return all(each.is_private for each in self._ranges_of(storage))

    def is_file(self, storage: torch.UntypedStorage) -> bool:
        """Whether a host storage lies in a file that somebody may still want."""
        return any(each.is_file for each in self._ranges_of(storage))

    def _ranges_of(self, storage: torch.UntypedStorage) -> list[Range]:
        first = max(0, bisect_right(self._starts, storage.data_ptr()) - 1)
        last = bisect_left(self._starts, storage.data_ptr() + storage.nbytes())
        return [each for each in self._ranges[first:last] if each.end > storage.data_ptr()]

    def carry(self, storage: torch.UntypedStorage, start: int, size: int, to: int) -> tuple[int, int]:
        """Move the whole pages among `size` bytes from the address `start` inside `storage`, as if to the address `to`,
        which lies alike within its page. They are no longer offered with the storage.

        Returns:
            The bytes before the first page, and the bytes moved.
        """
        first, last = _whole_pages(start, size)
        at = first
        while last - at >= _SMALLEST_MOVE_BYTES and (moved := _move(at, to + at - start, last - at)):
            at += moved
        if at > first:
            self._carried[number_of(storage)].append((first, at))
        return first - start, at - first

    def offer(self, tensor: torch.Tensor, wanted_bytes: int) -> int:
        """Take the memory of the tensor's whole storage away, from whoever else refers to it.

        Args:
            wanted_bytes: what may still be filled; more is not kept.

        Returns:
            The storage's bytes, but for those that were carried away.
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
        """Put pages under addresses that have none yet, from the start of a page to before the end of one."""
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
        """Give back what is more than `limit_bytes`."""
        while self._pool and self.num_bytes > limit_bytes:
            storage, first, last = self._pool.pop()
            discard(first, last - first)
            self.num_bytes -= last - first
            self._drop(storage)

    def _drop(self, storage: torch.UntypedStorage) -> None:
        """Release it with the last of its ranges."""
        if all(other is not storage for other, _, _ in self._pool):
            _release(storage)


def _move(source: int, target: int, size: int) -> int:
    """Move the first pages of `size` bytes, as many as go at once; returns their bytes."""
    # A range that was put together by earlier moves can only be moved in the pieces that it is made of.
    while not move_pages(source, target, size):
        if size < 2 * _SMALLEST_MOVE_BYTES:
            return 0
        size = size // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    return size


def _whole_pages(start: int, size: int) -> tuple[int, int]:
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE


def _between(outer: tuple[int, int], holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """`outer` without `holes`, which are sorted and apart."""
    ends = [outer[0], *(last for _, last in holes)]
    return list(zip(ends, [*(first for first, _ in holes), outer[1]], strict=True))


def _release(storage: torch.UntypedStorage) -> None:
    """Give a host storage's memory back; what was moved away is not there any more."""
    # The allocator would keep the pages of all that it does not map by itself.
    discard(storage.data_ptr(), storage.nbytes())
    if storage.resizable():  # unlike what `Mapped` gave, or what numpy has seen
        storage.resize_(0)
