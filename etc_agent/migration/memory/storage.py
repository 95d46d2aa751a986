"""A worker's old and new tensors in `release` mode: memory is allocated and freed step by step.

A new tensor is allocated when its first bytes are about to arrive, and an old one is freed when its last bytes have
been sent. The sum stays below a budget that is checked before anything moves.
"""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory.bits import as_bytes, dtype_name
from etc_agent.migration.memory.carrying import Carry, carry_of
from etc_agent.migration.memory.lifetimes import Lifetimes, Step
from etc_agent.migration.memory.pages import Mapped, can_map, prefault, prefer_huge_pages
from etc_agent.migration.memory.parcels import lay_out, tensors_of
from etc_agent.migration.memory.recycling import PagePool
from etc_agent.migration.report import MemoryPoint
from etc_agent.planner.transfers.plan import Refer
from etc_agent.state.layout import Shard
from etc_agent.torch_private.tensors import storage_key


class OnDemand:
    """Allocates new tensors and frees old ones, step by step.

    Args:
        sources: released by the caller: their storages are emptied during the migration, even where other tensors
            refer to them. A storage with bytes that no shard of `sources` covers stays, and so does a named file.
        device: where new tensors go.

    Attributes:
        held_bytes: of old and new tensors, plus what the caller adds (buffers).
        limit_bytes: `held_bytes` and the pages of the pool together stay below this.
    """

    def __init__(self, worker: int, sources: Mapping[Shard, torch.Tensor], device: torch.device) -> None:
        self.sources = dict(sources)
        self.targets: dict[Shard, torch.Tensor] = {}
        self.timeline: list[MemoryPoint] = []
        self._reserved: dict[Shard, torch.Tensor] = {}
        self._to_come_bytes = 0
        self._touched: dict[Shard, None] = {}
        self._touched_bytes = 0
        self._carries: dict[Shard, Carry] = {}
        self._pool = PagePool()
        self._worker = worker
        self._device = device
        self._members: dict[int, set[Shard]] = defaultdict(set)
        for shard, tensor in sources.items():
            self._members[storage_key(tensor)].add(shard)
        self._pinned = {key for key, shards in self._members.items() if not self._may_empty(shards)}
        self.old_bytes = sum(
            self.sources[next(iter(shards))].untyped_storage().nbytes() for shards in self._members.values()
        )
        self.held_bytes = self.old_bytes
        self.limit_bytes = 1 << 62
        self.note()

    def keep_whole(self, refers: Sequence[Refer]) -> None:
        """Shards that are equal before and after the change become new tensors without a copy."""
        for refer in refers:
            if refer.is_whole:
                shard = Shard(refer.tensor, refer.box)
                self.targets[shard] = self.sources[shard]
                self._pinned.add(storage_key(self.sources[shard]))

    def freed_bytes(self, lifetimes: Lifetimes) -> dict[Shard, int]:
        """Old shard -> bytes that its close will free: a shared storage is freed with the last of its shards."""
        left = {key: set(shards) for key, shards in self._members.items()}
        freed = {}
        for step in (*lifetimes.local, *lifetimes.rounds):
            for shard in step.closes:
                key = storage_key(self.sources[shard])
                left[key].discard(shard)
                if not left[key] and key not in self._pinned:
                    freed[shard] = self.sources[shard].untyped_storage().nbytes()
        return freed

    def source(self, shard: Shard) -> torch.Tensor:
        return self.sources[shard]

    def target(self, shard: Shard) -> torch.Tensor:
        """The new tensor. Before it is allocated, a tensor of its shape without memory (at its address if reserved)."""
        tensor = self.targets.get(shard, self._reserved.get(shard))
        return tensor if tensor is not None else self._empty(shard, torch.device("meta"))

    def reserve(self, lifetimes: Lifetimes, may_carry: Mapping[Shard, Refer]) -> bool:
        """Reserve addresses for the new tensors, without memory, so that views of them can be made now.

        Memory is then allocated by page faults as bytes arrive: on the host only.

        Args:
            may_carry: new shard -> the local part whose pages it may take over from the old shard (`carrying`).

        Returns:
            Whether addresses were reserved.
        """
        if self._device.type != "cpu" or not can_map:
            return False
        coming = [shard for step in (*lifetimes.local, *lifetimes.rounds) for shard in step.opens]
        self._carries = {shard: c for shard in coming if shard in may_carry and (c := self._carry(may_carry[shard]))}
        parcels, size = lay_out(coming, {shard: carry.shift for shard, carry in self._carries.items()})
        if size:
            try:
                memory = Mapped(size)
            except OSError:
                self._carries = {}
                return False
            tensors = tensors_of(memory, parcels)
            self._reserved = {shard: tensors[shard] for shard in coming if shard in tensors}
            for shard, tensor in self._reserved.items():
                for part in self._without_carried(shard, tensor):
                    prefer_huge_pages(part)
            self._to_come_bytes = sum(self._fresh_bytes(shard) for shard in self._reserved)
        return True

    @property
    def carried(self) -> Collection[Refer]:
        """The local parts that need no copy: `open` moves their pages under the new tensor."""
        return {carry.refer for carry in self._carries.values()}

    def touch_ahead(self, limit_bytes: int) -> None:
        """Allocate the first new tensors now, during the preparation, up to `limit_bytes`.

        They are taken in the order in which they open, so that the peak of the run does not rise.
        """
        for shard, tensor in self._reserved.items():
            fresh_bytes = self._fresh_bytes(shard)
            if self._touched_bytes + fresh_bytes > limit_bytes:
                break
            if not all(prefault(part) for part in self._without_carried(shard, tensor)):
                break
            self._touched[shard] = None
            self._touched_bytes += fresh_bytes
            self._to_come_bytes -= fresh_bytes

    def open(self, step: Step) -> None:
        """Allocate the new tensors of this step."""
        for shard in step.opens:
            reserved = self._reserved.pop(shard, None)
            if reserved is None:
                self.targets[shard] = self._empty(shard, self._device)
            else:
                self.targets[shard] = reserved
            self.held_bytes += shard.num_bytes
            if shard in self._touched:
                self._touched_bytes -= self._fresh_bytes(shard)
            else:
                self._to_come_bytes -= self._fresh_bytes(shard)
            if reserved is not None:
                self._provide(shard, reserved)
        if step.opens:
            self._trim_pool()

    def close(self, step: Step) -> None:
        """The step's copies and messages are done: free its old shards."""
        for shard in step.closes:
            tensor = self.sources.pop(shard)
            key = storage_key(tensor)
            self._members[key].discard(shard)
            if not self._members[key] and key not in self._pinned:
                self.held_bytes -= self._pool.offer(tensor, self._to_come_bytes)
        if step.closes:
            self._trim_pool()

    def note(self) -> None:
        """Record the present number of bytes in the timeline."""
        self.timeline.append(MemoryPoint(time.time(), self.held_bytes + self._pool.num_bytes + self._touched_bytes))

    def _carry(self, refer: Refer) -> Carry | None:
        source = self.sources[Shard(refer.tensor, refer.source_box)]
        key = storage_key(source)
        # Moving these pages would corrupt other tensors in the same storage.
        is_alone = len(self._members[key]) == 1 and key not in self._pinned
        return carry_of(refer, source) if is_alone and self._pool.can_move(source.untyped_storage()) else None

    def _provide(self, shard: Shard, new: torch.Tensor) -> None:
        """Put pages under a new tensor: carried ones (copying what is before and after them), then pages of the
        pool."""
        carry = self._carries.get(shard)
        gaps = [(_page_of(new.data_ptr()), new.data_ptr() + new.nbytes)]
        before = moved = 0
        if carry is not None:
            source = self.sources[Shard(carry.refer.tensor, carry.refer.source_box)]
            start, to = source.data_ptr() + carry.source_start, new.data_ptr() + carry.target_start
            before, moved = self._pool.carry(source.untyped_storage(), start, carry.num_bytes, to)
            self.held_bytes -= moved
            gaps = [(gaps[0][0], to + before), (to + before + moved, gaps[0][1])]
        if shard not in self._touched:
            for gap in gaps:
                self._pool.fill(*gap)
        if carry is not None:
            old_bytes = as_bytes(source)[carry.source_start : carry.source_start + carry.num_bytes]
            new_bytes = as_bytes(new)[carry.target_start : carry.target_start + carry.num_bytes]
            new_bytes[:before] = old_bytes[:before]
            new_bytes[before + moved :] = old_bytes[before + moved :]

    def _without_carried(self, shard: Shard, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a new tensor that carried pages do not cover."""
        flat, carry = as_bytes(tensor), self._carries.get(shard)
        parts = (flat[: carry.target_start], flat[carry.target_start + carry.num_bytes :]) if carry else (flat,)
        return [part for part in parts if part.numel()]

    def _fresh_bytes(self, shard: Shard) -> int:
        """How many bytes a new tensor will need beside carried pages."""
        carry = self._carries.get(shard)
        return shard.num_bytes - (max(0, carry.num_bytes - 2 * mmap.PAGESIZE) if carry else 0)

    def _trim_pool(self) -> None:
        """Free pool pages that no new tensor needs or that exceed the limit, and record what is held now."""
        room_bytes = max(0, self.limit_bytes - self.held_bytes - self._touched_bytes)
        self._pool.shrink(room_bytes if self._to_come_bytes > 0 else 0)
        self.note()

    def _may_empty(self, shards: set[Shard]) -> bool:
        """Whether a storage is covered by the tensors of `shards`, so that emptying it loses nothing else."""
        tensors = [self.sources[shard] for shard in shards]
        storage = tensors[0].untyped_storage()
        if storage.device.type == "cpu" and not tensors[0].is_pinned() and self._pool.is_file(storage):
            return False
        covered = storage.data_ptr()
        for start, size in sorted((t.data_ptr(), t.nbytes) for t in tensors if _is_dense(t)):
            if start > covered:
                return False
            covered = max(covered, start + size)
        return covered >= storage.data_ptr() + storage.nbytes()

    def _empty(self, shard: Shard, device: torch.device) -> torch.Tensor:
        try:
            return torch.empty(shard.box.shape, dtype=getattr(torch, shard.tensor.dtype), device=device)
        except RuntimeError as error:
            raise MigrationError(
                f"worker {self._worker}: no memory for {shard.num_bytes} bytes of {shard.tensor.name!r} "
                f"({dtype_name(getattr(torch, shard.tensor.dtype))}) on {device}: {error}"
            ) from error


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements, in any order, fill the memory from the first to the last of them."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()


def _page_of(address: int) -> int:
    return address // mmap.PAGESIZE * mmap.PAGESIZE
