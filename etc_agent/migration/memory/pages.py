"""Mapped memory for host tensors, and madvise on its pages (Linux; elsewhere the advice does nothing)."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

_MAP_NORESERVE = 0x4000
_MREMAP_INTO = 1 | 2 | 4  # may move, to a fixed address, leaving the old range mapped; Linux 5.7
_MADV_DONTNEED = 4
_MADV_REMOVE = 9
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_HUGE_PAGE_BYTES = 2 << 20

can_map = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *(ctypes.c_int,) * 3, ctypes.c_long)
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

class Mapped:
    """A range of addresses, unmapped when no tensor made of it is left. Linux only.

    `mmap.mmap` would do the same, but holds a file descriptor of its own for as long as it lives.

    Args:
        size: bytes.
        fd: the file to map; without one the memory is private, and its pages are allocated when they are written.

    Raises:
        OSError: the range cannot be mapped.
    """

    def __init__(self, size: int, fd: int = -1) -> None:
        assert _libc is not None
        self._size = size
        self._owner = os.getpid()
        self._address: int | None = None
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"cannot map {size:,} bytes: {os.strerror(ctypes.get_errno())}")
        self._address = address

    def part(self, start: int, size: int, *, gives_back: bool) -> ctypes.Array[ctypes.c_char]:
        """`size` bytes from `start`, for `torch.frombuffer`.

        Args:
            gives_back: free the pages when the last tensor over these bytes is freed, although the range stays mapped.
        """
        assert self._address is not None
        part = (ctypes.c_char * size).from_address(self._address + start)
        # The finalizer keeps this range alive as long as `part`, and `part` lives as long as any tensor over it.
        weakref.finalize(part, self._part_went, start, size, gives_back).atexit = False
        return part

    def _part_went(self, start: int, size: int, gives_back: bool) -> None:
        # A forked child shares the pages of a file with its parent, which may still need them.
        if gives_back and self._owner == os.getpid() and self._address is not None:
            discard(self._address + start, size)

    def __del__(self) -> None:
        if self._address is not None and _libc is not None:
            _libc.munmap(self._address, self._size)


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Let the kernel back a contiguous host tensor with huge pages of 2 MiB where pages are not allocated yet and the
    huge page lies inside the tensor: one page fault instead of 512."""
    start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    _advise(start, end, _MADV_HUGEPAGE)


def prefault(tensor: torch.Tensor) -> bool:
    """Allocate every page from the first to the last byte of a host tensor for writing, without changing its bytes.

    Returns:
        Whether the kernel did so.
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(tensor.data_ptr() + span_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    return _advise(start, end, _MADV_POPULATE_WRITE)


@dataclass(frozen=True, slots=True)
class Range:
    """Addresses from `start` to before `end`. `is_private`: writable, anonymous, and not shared with another process.
    `is_file`: a named file is mapped there, so writing or discarding pages would change the file."""

    start: int
    end: int
    is_private: bool
    is_file: bool


def mapped_ranges() -> list[Range]:
    """All mapped memory of this process, in address order."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        shared, anonymous = permissions[3] == "s", inode == "0"
        named = not anonymous and not path[0].endswith(" (deleted)")
        found.append(Range(start, end, not shared and anonymous and permissions[1] == "w", shared and named))
    return found


def move_pages(source: int, target: int, size: int) -> bool:
    """Move whole pages of private memory from `source` to `target`, replacing what is mapped at `target`.

    The old addresses stay mapped and read as zeros. Nothing is moved where `source` spans several kinds of memory.

    Returns:
        Whether the kernel did so.
    """
    return _libc is not None and _libc.mremap(source, size, size, _MREMAP_INTO, target) == target


def discard(address: int, size: int) -> None:
    """Free the pages that lie wholly inside a range, private or shared; their contents are lost."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    _advise(start, end, _MADV_REMOVE) or _advise(start, end, _MADV_DONTNEED)


def _advise(start: int, end: int, advice: int) -> bool:
    return _libc is not None and end > start and _libc.madvise(start, end - start, advice) == 0
