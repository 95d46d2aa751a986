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
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from etc_agent.migration.bits import as_bits
from etc_agent.migration.memory_file import DESCRIPTION_BYTES, MemoryFile, map_described
from etc_agent.migration.pages import prefault
from etc_agent.migration.parcels import Parcel, lay_out, tensor_at, tensors_of
from etc_agent.migration.schedule import Message
from etc_agent.planner.plan import MigrationPlan
from etc_agent.state.layout import Shard


class SharedMemory:
    """The new tensors of one worker, touched and ready to be written to by its peers.

    Args:
        plan, worker: every new shard of `worker` gets memory, but for those that keep their old storage.

    Attributes:
        tensors: shard -> contiguous tensor, each over a storage of exactly its bytes. The memory lives as long as any.
    """

    def __init__(self, plan: MigrationPlan, worker: int) -> None:
        parcels, size = arena_layout(plan, worker)
        self._file: MemoryFile | None = None
        self.tensors: dict[Shard, torch.Tensor] = {}
        if not size:
            return
        self._file = MemoryFile(size)
        memory = self._file.memory
        flat = torch.frombuffer(memory.part(0, size, gives_back=False), dtype=torch.uint8)
        if not prefault(flat):
            flat.zero_()
        self.tensors = tensors_of(memory, parcels)

    def describe(self) -> bytes:
        """What a peer needs to find this memory; `DESCRIPTION_BYTES` long."""
        return bytes(DESCRIPTION_BYTES) if self._file is None else self._file.describe()

    def holds(self, shard: Shard, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the one that was allocated here for `shard`."""
        mine = self.tensors.get(shard)
        return mine is not None and mine.data_ptr() == tensor.data_ptr() and tensor.is_contiguous()

    def close(self) -> None:
        """No peer can map this memory any more. The tensors stay."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A peer's `SharedMemory`, mapped into this process for writing."""

    memory: ctypes.Array[ctypes.c_char]
    offsets: Mapping[Shard, int]

    def tensor(self, shard: Shard) -> torch.Tensor:
        """The peer's new tensor of `shard`."""
        return tensor_at(self.memory, self.offsets[shard], shard)


@dataclass(frozen=True, slots=True)
class PeerTensors:
    """Where shared messages go in `keep` mode: straight into the new tensors of the peer."""

    peers: Mapping[int, PeerMemory]

    def outgoing(self, message: Message) -> tuple[torch.Tensor, ...]:
        memory = self.peers[message.peer]
        targets = tuple(
            as_bits(memory.tensor(Shard(t.tensor, t.target_box))[t.box.within(t.target_box)])
            for t in message.transfers
        )
        for target in targets:
            prefault(target)
        return targets

    def incoming(self, message: Message) -> tuple[torch.Tensor, ...]:
        """They are where they belong already."""
        return ()


def map_peer(plan: MigrationPlan, peer: int, described: bytes) -> PeerMemory | None:
    """The memory that `peer` described, or None where it is on another host, of another user, or gone."""
    parcels, size = arena_layout(plan, peer)
    memory = map_described(described, size)
    if memory is None:
        return None
    return PeerMemory(memory, {shard: start for parcel in parcels for shard, start in parcel.starts.items()})


def arena_layout(plan: MigrationPlan, worker: int) -> tuple[list[Parcel], int]:
    """Where the new shards of `worker` lie in its shared memory, and its size in bytes; the same in every process."""
    kept = {Shard(r.tensor, r.target_box) for r in plan.refers if r.worker == worker and r.is_whole}
    received = (Shard(t.tensor, t.target_box) for transfers in plan.rounds for t in transfers if t.target == worker)
    referred = (Shard(r.tensor, r.target_box) for r in plan.refers if r.worker == worker)
    return lay_out(sorted({*received, *referred} - kept))
