"""gloo's sends and receives, and the one way to free a thread that waits for one.

gloo never ends a send or receive of which a part was transferred when its connection ended: whoever waits for it waits
for the timeout of the group. PyTorch can abort such a wait in C++ (`Work::abort`), but does not offer that in Python.
So it is called in the library itself. The C++ class of an object is recognised by its virtual table; where the library
has no such function, nothing is called.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

NAMES = ("torch._C._distributed_c10d.Work",)

_CLASSES = "SendWork", "RecvWork"
_SYMBOL = "N4c10d16ProcessGroupGloo8{}"
_TABLE_HEAD_BYTES = 16
"""An object points behind the two words with which its class's virtual table begins."""

Abort = Callable[[dist.Work], None]

_wait = dist.Work.wait


def abort_of(work: dist.Work) -> Abort | None:
    """The function that ends a wait for `work`, the present one or the next, with the result False; None where `work`
    is no send or receive of gloo. It may be called from any thread."""
    aborts = _aborts()
    if not aborts:
        return None
    abort = aborts.get(_word_at(_address(work)))
    return None if abort is None else lambda each: abort(ctypes.c_void_p(_address(each)))


def replace_wait(make: Callable[[Callable[..., bool]], Callable[..., bool]]) -> None:
    """Have every ``work.wait()`` in Python call ``make(wait)``, where ``wait`` is PyTorch's own."""
    dist.Work.wait = make(_wait)  # type: ignore[method-assign, assignment]


@functools.cache
def _aborts() -> dict[int, Callable[[ctypes.c_void_p], None]]:
    """The virtual table of a class -> its `abort`."""
    found: dict[int, Callable[[ctypes.c_void_p], None]] = {}
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        for name in _CLASSES:
            symbol = _SYMBOL.format(name)
            table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{symbol}E")) + _TABLE_HEAD_BYTES
            abort = getattr(library, f"_Z{symbol}5abortEv")
            abort.restype = None
            found[table] = abort
    except (OSError, AttributeError, ValueError):
        return {}
    return found


def _address(work: dist.Work) -> int:
    """Where the C++ object of a Python object is: pybind11 stores it first."""
    return _word_at(id(work) + object.__basicsize__)


def _word_at(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0
