"""gloo's backends: the devices that they listen on, and the class that torch.distributed makes them of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

NAMES = (
    "torch.distributed.ProcessGroupGloo._Options",
    "torch.distributed.ProcessGroupGloo._Options._devices",
    "torch.distributed.ProcessGroupGloo._Options._timeout",
    "torch.distributed.ProcessGroupGloo._Options._threads",
)

_INTERFACES = "GLOO_SOCKET_IFNAME"


def make_devices() -> list[Any]:
    """gloo's devices for one backend, made as PyTorch makes them by default. Each listens on a TCP port of its own."""
    names = os.environ.get(_INTERFACES)
    if not names:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]


def options_of(devices: Sequence[Any], timeout: timedelta) -> Any:
    """The options of a backend over `devices`."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._timeout = timeout
    options._threads = 2 * len(devices)
    return options


def make_groups_of(backend: type[dist.ProcessGroupGloo]) -> None:
    """Have torch.distributed make the gloo backends of its groups of this class."""
    c10d.ProcessGroupGloo = backend  # type: ignore[misc, assignment]
