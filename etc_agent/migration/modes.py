"""Which mode a migration runs in: `keep` where old and new state fit into memory together, else `release`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from etc_agent.migration.transport.wire import Wire
from etc_agent.state.layout import Manifest

Mode = Literal["keep", "release"]
MODES = ("auto", "keep", "release")
"""The possible requests; ``auto`` leaves the choice to `choose_mode`."""

_NO_BUDGET = 1 << 62
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


@dataclass(frozen=True, slots=True)
class Bid:
    """What one worker has to say to the choice of a mode.

    `weight`: 2 where it asks for `release`, 1 where its old and new state do not fit, else 0. `why` is for people.
    `insists`: it asks for `keep`.
    """

    weight: int
    budget_bytes: int | None
    insists: bool
    why: str


def bid_of(worker: int, request: ModeRequest, old: Manifest, new: Manifest) -> Bid:
    """The bid of a worker whose manifests these are. Pure."""
    budget_bytes, insists = request.budget_bytes or None, request.mode == "keep"
    if request.mode == "release":
        return Bid(2, budget_bytes, insists, f"worker {worker} asks for it")
    old_bytes = sum(shard.num_bytes for shard in old)
    # A shard that stays on the worker is counted once.
    both_bytes = sum(shard.num_bytes for shard in {*old, *new})
    room_bytes = request.budget_bytes or old_bytes + request.free_bytes
    if request.mode == "auto" and both_bytes > room_bytes:
        why = (f"old and new state of worker {worker} take {both_bytes:,} bytes together, "
               f"there is room for {room_bytes:,}")
        return Bid(1, budget_bytes, insists, why)
    return Bid(0, budget_bytes, insists, "")


def choose_mode(bids: Sequence[Bid]) -> Choice:
    """One mode for all workers. If one worker asks for `release`, all use it; under ``auto``, if one worker's old and
    new state do not fit. The first of the weightiest bids gives the reason. Pure."""
    budget_bytes = min((bid.budget_bytes for bid in bids if bid.budget_bytes), default=None)
    weightiest = max(bids, key=lambda bid: bid.weight)
    if weightiest.weight:
        return Choice("release", budget_bytes, weightiest.why)
    insist = all(bid.insists for bid in bids)
    return Choice("keep", budget_bytes, "every worker asks for it" if insist else "old and new state fit together")


def choose_together(wire: Wire, mine: Bid, timeout: datetime.timedelta) -> Choice:
    """`choose_mode` of all workers' bids, without collecting them. Collective.

    Raises:
        RuntimeError: a worker was lost, or does not answer in time.
    """
    position = mine.weight * wire.size + wire.size - 1 - wire.rank
    most, negative, differs = wire.maximum(
        [position, -(mine.budget_bytes or _NO_BUDGET), not mine.insists], timeout
    )
    budget_bytes = None if -negative == _NO_BUDGET else -negative
    weight = most // wire.size
    why = wire.broadcast_bytes(wire.size - 1 - most % wire.size, mine.why.encode(), timeout).decode() if weight else ""
    return choose_mode([Bid(weight, budget_bytes, not differs, why)])


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
