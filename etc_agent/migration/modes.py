"""Which mode a migration runs in: `keep` where old and new state fit into memory together, else `release`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from etc_agent.state.layout import Manifest

Mode = Literal["keep", "release"]
MODES = ("auto", "keep", "release")
"""The possible requests; ``auto`` leaves the choice to `choose_mode`."""

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ModeRequest:
    """What one worker asks for.

    `mode`: one of `MODES`. `budget_bytes`: the most bytes that its state may use during a migration, 0 where not given.
    `free_bytes`: what is free on its device now, divided by the number of workers that share the device.
    """

    mode: str
    budget_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """`budget_bytes`: of every worker in `release`, None for its default. `why` is for people."""

    mode: Mode
    budget_bytes: int | None
    why: str


def choose_mode(requests: Sequence[ModeRequest], previous: Sequence[Manifest], current: Sequence[Manifest]) -> Choice:
    """One mode for all workers, the same on each: entry i of every sequence is worker i's.

    Pure. If one worker asks for `release`, all use it; under ``auto``, if one worker's old and new state do not fit.
    """
    budget_bytes = min((request.budget_bytes for request in requests if request.budget_bytes), default=None)
    for worker, request in enumerate(requests):
        if request.mode == "release":
            return Choice("release", budget_bytes, f"worker {worker} asks for it")
    for worker, (request, old, new) in enumerate(zip(requests, previous, current, strict=True)):
        old_bytes = sum(shard.num_bytes for shard in old)
        # A shard that stays on the worker is counted once.
        both_bytes = sum(shard.num_bytes for shard in {*old, *new})
        room_bytes = request.budget_bytes or old_bytes + request.free_bytes
        if request.mode == "auto" and both_bytes > room_bytes:
            return Choice(
                "release", budget_bytes,
                f"old and new state of worker {worker} take {both_bytes:,} bytes together, "
                f"there is room for {room_bytes:,}",
            )
    insist = all(request.mode == "keep" for request in requests)
    return Choice("keep", budget_bytes, "every worker asks for it" if insist else "old and new state fit together")


def free_bytes(device: torch.device) -> int:
    """How many bytes can still be allocated on a device; on the host, within the limits of the control groups."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 1 << 62
    return min(available, _left_in_cgroups())


def _left_in_cgroups() -> int:
    """What the limits of this process's control group (v2) and of its parents leave."""
    left = 1 << 62
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        folder = _CGROUPS / own
        while folder != _CGROUPS.parent:
            limit = folder / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text()) - int(stat["inactive_file"])
                left = min(left, int(text) - used)
            folder = folder.parent
    except OSError:
        pass
    return max(0, left)
