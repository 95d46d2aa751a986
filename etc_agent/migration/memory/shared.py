"""Memory that workers of one host share, so that a box moves from tensor to tensor with a single copy.

In `keep` mode a worker's new tensors exist before the migration runs. They are allocated here, in one anonymous memory
file. Every sender on the same host maps that file during the preparation, and at the switch copies its boxes, strided
ones too, straight into the new tensors. A bell (`bells`) says that a round's boxes are there. Between hosts messages
travel over the process group (`neighbours`).

The pages of a large tensor are freed with that tensor, even while other tensors of the same file live; small tensors
share a few pages. So a tensor that outlives many generations keeps only its own memory allocated (and the range of
addresses around it).

A peer that writes late does no harm: the file of a failed migration is never used again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch

from etc_agent.migration.memory.bits import as_bits
from etc_agent.migration.memory.memory_file import MemoryFile, can_share
from etc_agent.migration.memory.pages import prefault
from etc_agent.migration.memory.parcels import Parcel, lay_out, tensor_at, tensors_of
from etc_agent.migration.schedule import Message
from etc_agent.migration.transport.places import Places
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.layout import Shard


class SharedMemory:
    """The new tensors of one worker, with all pages allocated, for its peers to write to.

    Args:
        plan, worker: every new shard of `worker` gets memory, except those that keep their old storage.

    Attributes:
        tensors: shard -> contiguous tensor over a storage of exactly its bytes. The memory lives as long as any of
            them.
        file: the memory file, for peers to map; None where there are no tensors, and after `close`.

    Raises:
        OSError: there is not enough memory, or no file descriptor is left.
    """

    def __init__(self, plan: MigrationPlan, worker: int) -> None:
        parcels, size = arena_layout(plan, worker)
        self._starts = _starts(parcels)
        self.file: MemoryFile | None = None
        self.tensors: dict[Shard, torch.Tensor] = {}
        if not size:
            return
        self.file = MemoryFile(size)
        memory = self.file.memory
        flat = torch.frombuffer(memory.part(0, size, gives_back=False), dtype=torch.uint8)
        if not prefault(flat):
            flat.zero_()
        self.tensors = tensors_of(memory, parcels)

    def holds(self, shard: Shard, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the one that was allocated here for `shard`."""
        mine = self.tensors.get(shard)
        return mine is not None and mine.data_ptr() == tensor.data_ptr() and tensor.is_contiguous()

    def places(self, message: Message) -> list[int]:
        """Where the new tensors of the boxes of a received message start."""
        return [self._starts[Shard(transfer.tensor, transfer.target_box)] for transfer in message.transfers]

    def close(self) -> None:
        """No peer can map this memory any more. The tensors stay."""
        if self.file is not None:
            self.file.close()
            self.file = None


def shared_memory_for(plan: MigrationPlan, worker: int, device: torch.device) -> SharedMemory | None:
    """`SharedMemory` where the system supports it and the process may allocate that much, else None."""
    if device.type != "cpu" or not can_share():
        return None
    try:
        return SharedMemory(plan, worker)
    except OSError:
        return None


class PeerTensors:
    """Where shared messages go in `keep` mode: straight into the new tensors of the peer.

    Args:
        mapped: peer -> its memory, mapped in this process.
        places: where the new tensors are in it.
    """

    def __init__(self, mapped: Mapping[int, ctypes.Array[ctypes.c_char]], places: Places) -> None:
        self._mapped = mapped
        self._places = places

    def outgoing(self, message: Message) -> tuple[torch.Tensor, ...]:
        memory, starts = self._mapped[message.peer], self._places[message.peer, message.tag]
        targets = []
        for transfer, start in zip(message.transfers, starts, strict=True):
            shard = Shard(transfer.tensor, transfer.target_box)
            target = as_bits(tensor_at(memory, start, shard)[transfer.box.within(shard.box)])
            prefault(target)
            targets.append(target)
        return tuple(targets)

    def incoming(self, message: Message) -> tuple[torch.Tensor, ...]:
        """Empty: the sender has written the boxes where they belong."""
        return ()


def arena_layout(plan: MigrationPlan, worker: int) -> tuple[list[Parcel], int]:
    """Where the new shards of `worker` lie in its shared memory, and its size in bytes."""
    kept = {Shard(r.tensor, r.target_box) for r in plan.refers if r.worker == worker and r.is_whole}
    received = (Shard(t.tensor, t.target_box) for transfers in plan.rounds for t in transfers if t.target == worker)
    referred = (Shard(r.tensor, r.target_box) for r in plan.refers if r.worker == worker)
    return lay_out(sorted({*received, *referred} - kept))


def _starts(parcels: Iterable[Parcel]) -> dict[Shard, int]:
    return {shard: start for parcel in parcels for shard, start in parcel.starts.items()}
