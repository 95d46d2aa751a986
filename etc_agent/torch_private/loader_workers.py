"""What a DataLoader's worker processes do before anything else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data._utils import signal_handling, worker

NAMES = (
    "torch.utils.data._utils.worker._worker_loop",
    "torch.utils.data._utils.signal_handling._set_worker_signal_handlers",
)

_LOOP = worker._worker_loop


def after_signal_handlers(call: Callable[[], None]) -> Callable[[], None]:
    """Have each worker process of a DataLoader that is started from now on run `call` as soon as PyTorch has set its
    own signal handlers there. For other start methods than fork, `call` has to be one that can be pickled.

    Returns what takes that back.
    """

    def undo() -> None:
        worker._worker_loop = _LOOP

    worker._worker_loop = partial(_loop, call)
    return undo


def _loop(call: Callable[[], None], *args: Any) -> None:
    """In the worker process."""
    set_handlers = signal_handling._set_worker_signal_handlers

    def set_and_call() -> None:
        set_handlers()
        call()

    signal_handling._set_worker_signal_handlers = set_and_call
    _LOOP(*args)
