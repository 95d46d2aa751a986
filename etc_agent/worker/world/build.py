"""Building a world: its default group, one group per axis, and the meshes over them.

Group names are process-global in torch's C++ code, so every world numbers its groups from an offset of its own, which
is the same on all of its ranks.
"""

from __future__ import annotations

import itertools
import math
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

AXES: Final = ("pp", "dp", "cp", "tp")
EXPERT_AXES: Final = ("pp", "edp", "ep", "tp")
"""The axes of the two meshes, slowest first, so that mesh ranks are virtual ranks. ep neighbours along dp x cp share
the experts (`parallel.config`); the edp ranks hold copies of the same ones."""

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
    world = _build(store, rank, config, backend, device, timedelta(seconds=timeout_s), contents)
    with entered(world):
        for group in world.groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    return world


def build_fake(rank: int, config: ParallelConfig, device: torch.device) -> World:
    """A world without peers, in which `rank`'s part of a model can be built under `config` on the meta device."""
    number = next(_fake_numbers)
    contents = Contents(number * GROUPS_PER_WORLD)
    return _build(fake_store(), rank, config, "fake", device, timedelta(seconds=1), contents)


_building = threading.Lock()


def _build(
    store: dist.Store,
    rank: int,
    config: ParallelConfig,
    backend: str,
    device: torch.device,
    timeout: timedelta,
    contents: Contents,
) -> World:
    with entered_contents(contents):
        excepthook = init_default_group(store, rank, config.num_ranks, backend, timeout)
        everyone = dist.group.WORLD
        assert everyone is not None
        groups = _AxisGroups(rank, everyone, timeout)
        shape = (config.pp, config.dp, config.cp, config.tp)
        mesh = _mesh(groups, shape, AXES, device.type)
        shape = (config.pp, config.dp * config.cp // config.ep, config.ep, config.tp)
        expert_mesh = _mesh(groups, shape, EXPERT_AXES, device.type)
    return World(config, rank, mesh, expert_mesh, contents, excepthook, groups.all)


def _mesh(groups: _AxisGroups, shape: tuple[int, ...], axes: tuple[str, ...], device_type: str) -> DeviceMesh:
    ranks = torch.arange(math.prod(shape), dtype=torch.int, device="cpu").reshape(shape)
    mine = [groups.along(ranks.movedim(index, -1)) for index in range(len(axes))]
    return DeviceMesh.from_group(mine, device_type, mesh=ranks, mesh_dim_names=axes)


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


class _AxisGroups:
    """The groups along the axes of a world that contain `rank`. Axes that divide the ranks alike share their group."""

    def __init__(self, rank: int, everyone: dist.ProcessGroup, timeout: timedelta) -> None:
        self._rank, self._timeout = rank, timeout
        self._made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
        self.all = [everyone]

    def along(self, lines: torch.Tensor) -> dist.ProcessGroup:
        """The group of this rank's line. `lines`: virtual ranks, that axis last. Every rank makes all groups."""
        rows = tuple(map(tuple, lines.reshape(-1, lines.shape[-1]).tolist()))
        if len(rows) == 1:
            return self.all[0]
        if rows not in self._made:
            made = {row: dist.new_group(list(row), timeout=self._timeout) for row in rows}
            mine = next(group for row, group in made.items() if self._rank in row)
            assert isinstance(mine, dist.ProcessGroup)
            self._made[rows] = mine
            self.all.append(mine)
        return self._made[rows]
