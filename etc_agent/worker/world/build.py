"""Building a world: its default group, one group per axis, and the mesh over them.

Group names are process-global in torch's C++ code, so every world numbers its groups from an offset of its own, which
is the same on all of its ranks.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from etc_agent.parallel.config import ParallelConfig
from etc_agent.torch_private.fake_groups import fake_store
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.swap import Contents, World, entered, entered_contents, original_excepthook

AXES: Final = ("pp", "dp", "tp")
"""The mesh's axes, slowest first, so that mesh ranks are virtual ranks."""

GROUPS_PER_WORLD: Final = 1_000_000
_FIRST_FAKE_WORLD: Final = 1_000_000
_fake_numbers = itertools.count(_FIRST_FAKE_WORLD)

def build(
    store: dist.Store, rank: int, config: ParallelConfig, number: int, device: torch.device, timeout_s: float,
    connections: Connections | None = None,
) -> World:
    """Build the process groups of generation `number` in the calling thread, beside the world that is in use.

    Collective over the ranks of `config`. `store` belongs to this generation and this thread only. Every group gets
    `timeout_s`, and runs one operation so that its connections are open before the switch. The world notes the
    connections of its groups in `connections`, or where it is None, on its own.

    Raises:
        dist.DistError, RuntimeError: a rank did not come in time.
    """
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    contents = Contents(number * GROUPS_PER_WORLD, connections)
    world = _build(store, rank, config, number, backend, device, timedelta(seconds=timeout_s), contents)
    with entered(world):
        for group in world.groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    return world


def build_fake(rank: int, config: ParallelConfig, device: torch.device) -> World:
    """A world without peers, in which `rank`'s part of a model can be built under `config` on the meta device."""
    number = next(_fake_numbers)
    contents = Contents(number * GROUPS_PER_WORLD)
    return _build(fake_store(), rank, config, number, "fake", device, timedelta(seconds=1), contents)


_building = threading.Lock()


def _build(
    store: dist.Store,
    rank: int,
    config: ParallelConfig,
    number: int,
    backend: str,
    device: torch.device,
    timeout: timedelta,
    contents: Contents,
) -> World:
    with entered_contents(contents):
        excepthook = init_default_group(store, rank, config.num_ranks, backend, timeout)
        everyone = dist.group.WORLD
        assert everyone is not None
        groups = [everyone]
        axes = []
        ranks = torch.arange(config.num_ranks, dtype=torch.int, device="cpu").reshape(config.pp, config.dp, config.tp)
        for index in range(len(AXES)):
            axis = _axis_group(ranks.movedim(index, -1), rank, everyone, timeout)
            axes.append(axis)
            if axis is not everyone:
                groups.append(axis)
        mesh = DeviceMesh.from_group(axes, device.type, mesh=ranks, mesh_dim_names=AXES)
        mesh.etc_world = number  # type: ignore[attr-defined]
    return World(config, rank, mesh, contents, excepthook, groups)


def init_default_group(
    store: dist.Store, rank: int, size: int, backend: str, timeout: timedelta
) -> Callable[..., Any]:
    """Make the default group of the entered contents; return the exception hook that torch has installed for it.

    At every call torch wraps the present hook, to write ``[rank0]`` before tracebacks. Since worlds are built again and
    again, each one wraps the process's original hook, and its hook is installed when the world is activated.
    """
    with _building:
        present = sys.excepthook
        sys.excepthook = original_excepthook
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            return sys.excepthook
        finally:
            sys.excepthook = present


def _axis_group(
    lines: torch.Tensor, rank: int, everyone: dist.ProcessGroup, timeout: timedelta
) -> dist.ProcessGroup:
    """The group along one axis that contains `rank`. `lines`: virtual ranks, that axis last. Every rank makes all
    groups.
    """
    rows = lines.reshape(-1, lines.shape[-1]).tolist()
    if len(rows) == 1:
        return everyone
    mine = None
    for row in rows:
        group = dist.new_group(row, timeout=timeout)
        if rank in row:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine
