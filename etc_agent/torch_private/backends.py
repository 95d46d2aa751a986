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


@contextmanager
def one_launch(group: Any, works: list[Any]) -> Iterator[None]:
    """Have the messages posted inside go out together; `works` is given the one work that stands for all."""
    group._start_coalescing()
    yield
    works.append(group._end_coalescing())
