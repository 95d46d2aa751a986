"""Raw backends of process groups, and many messages as one launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

NAMES = (
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroup._start_coalescing",
    "torch.distributed.ProcessGroup._end_coalescing",
)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that serves tensors of a device.

    Raises:
        RuntimeError: the group has none for it.
    """
    return group._get_backend(device)


def abort_device_backend(group: dist.ProcessGroup) -> None:
    """Abort the operations of a group on GPUs, so that the threads and streams that wait for them go on. gloo, which
    has no abort, is left alone. Call it from a thread that waits for none of them. Never run: no machine had two GPUs.
    """
    if not torch.cuda.is_available():
        return
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return  # a group over CPU memory alone
    if not isinstance(backend, dist.ProcessGroupGloo):
        backend.abort()


@contextmanager
def one_launch(group: Any, works: list[Any]) -> Iterator[None]:
    """Have the messages posted inside go out together; `works` is given the one work that stands for all."""
    group._start_coalescing()
    yield
    works.append(group._end_coalescing())
