"""A default dtype of its own for the thread in which `build` runs.

torch's default dtype is one for the process. Libraries set it for a while as they make a model (transformers does, to
the dtype of the checkpoint), and `build` runs while another thread trains: tensors that a step makes without naming
their dtype would get that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

_own: ContextVar[torch.dtype | None] = ContextVar("own_dtype", default=None)

_MAKERS: Final = frozenset({
    torch.arange, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones,
    torch.rand, torch.randn, torch.range, torch.scalar_tensor, torch.tensor, torch.zeros,
})
"""Functions that give a new tensor the default dtype where none is named."""


@contextmanager
def own_default_dtype() -> Iterator[None]:
    """Within the context, `torch.set_default_dtype` counts in this thread alone, and until its end."""
    _divide_by_thread()
    token = _own.set(torch.get_default_dtype())
    try:
        with _OwnDefaultDtype():
            yield
    finally:
        _own.reset(token)


class _OwnDefaultDtype(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func not in _MAKERS or kwargs.get("dtype") is not None or (args and hasattr(args[0], "dtype")):
            return made
        own, others = _own.get(), _default_of_process()
        return made.to(own) if own not in (None, others) and made.dtype == others else made


_default_of_process: Final = torch.get_default_dtype


@functools.cache
def _divide_by_thread() -> None:
    set_of_process = torch.set_default_dtype

    @functools.wraps(set_of_process)
    def set_default_dtype(dtype: torch.dtype) -> None:
        if _own.get() is None:
            set_of_process(dtype)
        else:
            _own.set(dtype)

    @functools.wraps(_default_of_process)
    def get_default_dtype() -> torch.dtype:
        return _own.get() or _default_of_process()

    torch.set_default_dtype = set_default_dtype
    torch.get_default_dtype = get_default_dtype
