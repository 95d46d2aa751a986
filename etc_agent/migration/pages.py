"""Advice to the kernel about the pages behind host tensors (Linux; elsewhere every call does nothing)."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

_MADV_DONTNEED = 4
_MADV_REMOVE = 9
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_HUGE_PAGE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def prefault(tensor: torch.Tensor) -> bool:
    """Map every page from the first to the last byte of a host tensor for writing, without changing its bytes.

    Returns:
        Whether the kernel did it.
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(tensor.data_ptr() + span_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    return _advise(start, end, _MADV_POPULATE_WRITE)


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Let untouched memory come in 2 MiB pages: a fault less for every 512 small ones."""
    start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    _advise(start, end, _MADV_HUGEPAGE)


def discard(tensor: torch.Tensor) -> None:
    """Give the pages inside a contiguous tensor back, be they shared or private; their bytes are lost."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _advise(start, end, _MADV_REMOVE) or _advise(start, end, _MADV_DONTNEED)


def _advise(start: int, end: int, advice: int) -> bool:
    return _libc is not None and end > start and _libc.madvise(start, end - start, advice) == 0
