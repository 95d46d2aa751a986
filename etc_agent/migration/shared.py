"""Memory that workers on one host share, so that a box goes from tensor to tensor with a single copy.

In `keep` mode a worker's new tensors exist before the migration runs. Allocated here, they lie in one anonymous memory
file (memfd, not /dev/shm); every sender on the same host maps that file while it prepares, and at the switch copies
its boxes straight to where they belong, strided ones too. The process group carries a byte per round to say "done".

Between hosts, and wherever mapping fails, messages go over the process group as ever; each pair decides for itself.

A large tensor gives its pages back when it goes, whatever else of its file is still in use; small ones share a few
pages. So a tensor that outlives many generations holds its own memory, and the addresses around it.

A late writer does no harm: if a migration is given up its file goes with it, and nothing else ever lies there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from etc_agent.migration.pages import Mapped, prefault
from etc_agent.migration.parcels import Parcel, lay_out, tensor_at, tensors_of
from etc_agent.planner.plan import MigrationPlan
from etc_agent.state.layout import Shard

DESCRIPTION_BYTES = 256


def can_share() -> bool:
    """Whether this system has anonymous memory files."""
    return hasattr(os, "memfd_create")


class SharedMemory:
    """The new tensors of one worker, touched and ready to be written to by its peers.

    Args:
        plan, worker: every new shard of `worker` gets memory, but for those that keep their old storage.

    Attributes:
        tensors: shard -> contiguous tensor, each over a storage of exactly its bytes. The memory lives as long as any.
    """

    def __init__(self, plan: MigrationPlan, worker: int) -> None:
        parcels, size = arena_layout(plan, worker)
        self._fd = -1
        self.tensors: dict[Shard, torch.Tensor] = {}
        if not size:
            return
        self._fd = os.memfd_create("etc-run-state", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        memory = Mapped(size, self._fd)
        flat = torch.frombuffer(memory.part(0, size, gives_back=False), dtype=torch.uint8)
        if not prefault(flat):
            flat.zero_()
        self.tensors = tensors_of(memory, parcels)

    def describe(self) -> bytes:
        """What a peer needs to find this memory; `DESCRIPTION_BYTES` long."""
        if self._fd < 0:
            return bytes(DESCRIPTION_BYTES)
        stat = os.fstat(self._fd)
        text = f"{_host_identity()} {os.getpid()} {self._fd} {stat.st_dev} {stat.st_ino} {stat.st_size}"
        return text.encode().ljust(DESCRIPTION_BYTES, b"\0")

    def holds(self, shard: Shard, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the one that was allocated here for `shard`."""
        mine = self.tensors.get(shard)
        return mine is not None and mine.data_ptr() == tensor.data_ptr() and tensor.is_contiguous()

    def close(self) -> None:
        """No peer can map this memory any more. The tensors stay."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A peer's `SharedMemory`, mapped into this process for writing."""

    memory: ctypes.Array[ctypes.c_char]
    offsets: Mapping[Shard, int]

    def tensor(self, shard: Shard) -> torch.Tensor:
        """The peer's new tensor of `shard`."""
        return tensor_at(self.memory, self.offsets[shard], shard)


def map_peer(plan: MigrationPlan, peer: int, described: bytes) -> PeerMemory | None:
    """The memory that `peer` described, or None where it is on another host, of another user, or gone."""
    fields = described.rstrip(b"\0").decode().split()
    if len(fields) != 6 or fields[0] != _host_identity():
        return None
    pid, fd, device, inode, size = map(int, fields[1:])
    parcels, expected = arena_layout(plan, peer)
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        stat = os.fstat(opened)
        # The same number may mean another file by now, and another process.
        if (stat.st_dev, stat.st_ino, stat.st_size) != (device, inode, size) or size != expected:
            return None
        memory = Mapped(size, opened).part(0, size, gives_back=False)
        return PeerMemory(memory, {shard: start for parcel in parcels for shard, start in parcel.starts.items()})
    except OSError:
        return None
    finally:
        os.close(opened)


def arena_layout(plan: MigrationPlan, worker: int) -> tuple[list[Parcel], int]:
    """Where the new shards of `worker` lie in its shared memory, and its size in bytes; the same in every process."""
    kept = {Shard(r.tensor, r.target_box) for r in plan.refers if r.worker == worker and r.is_whole}
    received = (Shard(t.tensor, t.target_box) for transfers in plan.rounds for t in transfers if t.target == worker)
    referred = (Shard(r.tensor, r.target_box) for r in plan.refers if r.worker == worker)
    return lay_out(sorted({*received, *referred} - kept))


def _host_identity() -> str:
    """This boot of this host, and what decides whether one process can see another: pid namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.getuid()}"
