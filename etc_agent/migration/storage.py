"""Where a worker's old and new tensors live during a migration: the two modes of `Migration`.

`Held` is `keep`: old and new state lie side by side, and the old one stays whole. `OnDemand` is `release`: a new tensor
gets memory when its first bytes are about to arrive, an old one loses it when its last bytes have gone, and the sum
stays below a budget that is checked before anything moves.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from etc_agent.migration.bits import dtype_name
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.lifetimes import Lifetimes, Step
from etc_agent.migration.pages import Mapped, can_map, prefault
from etc_agent.migration.parcels import lay_out, tensors_of
from etc_agent.migration.recycling import SparePages
from etc_agent.migration.report import MemoryPoint
from etc_agent.planner.plan import Refer
from etc_agent.state.layout import Shard


class Storage(Protocol):
    """What `Migration` asks of a mode."""

    sources: dict[Shard, torch.Tensor]
    targets: dict[Shard, torch.Tensor]
    timeline: list[MemoryPoint]

    def source(self, shard: Shard) -> torch.Tensor: ...

    def target(self, shard: Shard) -> torch.Tensor: ...

    def note(self) -> None: ...


class Held:
    """Everything is there from the start and stays."""

    def __init__(self, sources: Mapping[Shard, torch.Tensor], targets: Mapping[Shard, torch.Tensor]) -> None:
        self.sources = dict(sources)
        self.targets = dict(targets)
        self.timeline: list[MemoryPoint] = []
        # Tensors that share a storage hold it once.
        storages = [tensor.untyped_storage() for tensor in (*sources.values(), *targets.values())]
        self._held_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def source(self, shard: Shard) -> torch.Tensor:
        return self.sources[shard]

    def target(self, shard: Shard) -> torch.Tensor:
        return self.targets[shard]

    def note(self) -> None:
        """Put the bytes of old and new tensors on the timeline."""
        self.timeline.append(MemoryPoint(time.time(), self._held_bytes))


class OnDemand:
    """Memory comes and goes with the steps.

    Args:
        sources: given up by the caller: their storages are emptied as the migration goes, whoever else refers to them.
            A storage with bytes that no shard of `sources` covers stays.
        device: where new tensors go.
    """

    def __init__(self, worker: int, sources: Mapping[Shard, torch.Tensor], device: torch.device) -> None:
        self.sources = dict(sources)
        self.targets: dict[Shard, torch.Tensor] = {}
        self.timeline: list[MemoryPoint] = []
        self._reserved: dict[Shard, torch.Tensor] = {}
        self._to_come_bytes = 0
        self._touched: dict[Shard, None] = {}
        self._touched_bytes = 0
        self._spare = SparePages()
        self._worker = worker
        self._device = device
        self._members: dict[int, set[Shard]] = defaultdict(set)
        for shard, tensor in sources.items():
            self._members[_storage_key(tensor)].add(shard)
        self._pinned = {key for key, shards in self._members.items() if not self._covers(shards)}
        self.old_bytes = sum(
            self.sources[next(iter(shards))].untyped_storage().nbytes() for shards in self._members.values()
        )
        self.held_bytes = self.old_bytes
        self.note()

    def keep_whole(self, refers: Sequence[Refer]) -> None:
        """Shards that are the same before and after become targets as they are."""
        for refer in refers:
            if refer.is_whole:
                shard = Shard(refer.tensor, refer.box)
                self.targets[shard] = self.sources[shard]
                self._pinned.add(_storage_key(self.sources[shard]))

    def freed_bytes(self, lifetimes: Lifetimes) -> dict[Shard, int]:
        """What the close of each old shard will give back: a shared storage goes with the last of its shards."""
        left = {key: set(shards) for key, shards in self._members.items()}
        freed = {}
        for step in (*lifetimes.local, *lifetimes.rounds):
            for shard in step.closes:
                key = _storage_key(self.sources[shard])
                left[key].discard(shard)
                if not left[key] and key not in self._pinned:
                    freed[shard] = self.sources[shard].untyped_storage().nbytes()
        return freed

    def source(self, shard: Shard) -> torch.Tensor:
        return self.sources[shard]

    def target(self, shard: Shard) -> torch.Tensor:
        """The new tensor; before its time, one of its shape without memory (at its address if that is reserved)."""
        tensor = self.targets.get(shard, self._reserved.get(shard))
        return tensor if tensor is not None else self._empty(shard, torch.device("meta"))

    def reserve(self, lifetimes: Lifetimes) -> bool:
        """Give the tensors to come their addresses, without memory, so that views of them can be made now.

        Memory comes with the bytes, by the kernel's faults: on the host only.

        Returns:
            Whether that could be done.
        """
        if self._device.type != "cpu" or not can_map:
            return False
        # In the order of their coming: a huge page that reaches into the next tensor is then not early by much.
        coming = [shard for step in (*lifetimes.local, *lifetimes.rounds) for shard in step.opens]
        parcels, size = lay_out(coming)
        if size:
            try:
                memory = Mapped(size)
            except OSError:
                return False
            memory.prefer_huge_pages()
            tensors = tensors_of(memory, parcels)
            self._reserved = {shard: tensors[shard] for shard in coming if shard in tensors}
            self._to_come_bytes = sum(shard.num_bytes for shard in self._reserved)
        return True

    def touch_ahead(self, limit_bytes: int) -> None:
        """Give memory now to the first tensors to come, up to `limit_bytes`: what a worker grows by need not wait.

        The first ones, so that all of them are open before any other opens, and the peak is what it was.
        """
        for shard, tensor in self._reserved.items():
            if self._touched_bytes + shard.num_bytes > limit_bytes or not prefault(tensor):
                break
            self._touched[shard] = None
            self._touched_bytes += shard.num_bytes
            self._to_come_bytes -= shard.num_bytes

    def open(self, step: Step) -> None:
        """Provide memory for what the step brings into being."""
        for shard in step.opens:
            reserved = self._reserved.pop(shard, None)
            if reserved is None:
                self.targets[shard] = self._empty(shard, self._device)
            else:
                self.targets[shard] = reserved
            self.held_bytes += shard.num_bytes
            if shard in self._touched:
                self._touched_bytes -= shard.num_bytes
                continue
            self._to_come_bytes -= shard.num_bytes
            if reserved is not None:
                self._spare.fill(reserved)
        if step.opens:
            self._settle()

    def close(self, step: Step) -> None:
        """The step's copies and messages are done: take the memory of old shards away."""
        for shard in step.closes:
            tensor = self.sources.pop(shard)
            key = _storage_key(tensor)
            self._members[key].discard(shard)
            if not self._members[key] and key not in self._pinned:
                self.held_bytes -= self._spare.offer(tensor, self._to_come_bytes)
        if step.closes:
            self._settle()

    def note(self) -> None:
        """Put the present number of bytes on the timeline."""
        self.timeline.append(MemoryPoint(time.time(), self.held_bytes + self._spare.num_bytes + self._touched_bytes))

    def _settle(self) -> None:
        if self._to_come_bytes <= 0:
            self._spare.clear()
        self.note()

    def _covers(self, shards: set[Shard]) -> bool:
        tensors = [self.sources[shard] for shard in shards]
        spans = {(t.data_ptr(), t.nbytes) for t in tensors}
        return sum(size for _, size in spans) >= tensors[0].untyped_storage().nbytes()

    def _empty(self, shard: Shard, device: torch.device) -> torch.Tensor:
        try:
            return torch.empty(shard.box.shape, dtype=getattr(torch, shard.tensor.dtype), device=device)
        except RuntimeError as error:
            raise MigrationError(
                f"worker {self._worker}: no memory for {shard.num_bytes} bytes of {shard.tensor.name!r} "
                f"({dtype_name(getattr(torch, shard.tensor.dtype))}) on {device}: {error}"
            ) from error


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
