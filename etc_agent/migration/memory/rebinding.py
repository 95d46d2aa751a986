"""Old tensors that get other memory between `prepare` and `run`, in `keep` mode.

A script may do that, for example ``w.data, average.data = average.data, w.data`` for an evaluation with averaged
weights, or `optimizer.load_state_dict`. In `keep` mode no memory that the old generation uses may be written before the
commit, and memory that a tensor has left may still be in use by another. So a new tensor that was going to reuse its
old tensor's memory is not written to at its prepared place: it uses the old tensor's present memory, or gets memory of
its own where that has different strides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from etc_agent.migration.check import check_backed, describe
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory.binding import same_memory
from etc_agent.migration.memory.spans import Spans
from etc_agent.migration.schedule import Schedule
from etc_agent.planner.transfers.plan import Refer
from etc_agent.state.layout import Shard
from etc_agent.torch_private.tensors import number_of

Place = tuple[int, int, int, torch.Size, tuple[int, ...], torch.dtype]
"""Where a tensor is: storage address, offset in it, bytes of the storage, shape, strides and dtype."""


class OldPlaces:
    """Where the old tensors of one worker were when last looked at."""

    def __init__(self, worker: int, sources: Mapping[Shard, torch.Tensor]) -> None:
        self._worker = worker
        self._sources = sources  # keeps the storages alive, so that their addresses are not used again
        self._places = {shard: _place(tensor) for shard, tensor in sources.items()}

    def rebound(self, present: Mapping[Shard, torch.Tensor]) -> frozenset[Shard]:
        """The shards whose tensors have moved in `present`, or that exist only here or only there.

        Raises:
            MigrationError: a tensor has lost its memory.
        """
        known = self._places
        moved = {shard for shard, tensor in present.items() if known.get(shard) != _place(tensor)}
        for shard in moved:
            check_backed(self._worker, "old", shard, present[shard])
        if len(present) - len(moved - known.keys()) < len(known):
            moved |= known.keys() - present.keys()
        return frozenset(moved)


def _place(tensor: torch.Tensor) -> Place:
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    return number_of(storage), offset, storage.nbytes(), tensor.shape, tensor.stride(), tensor.dtype


class NewPlaces:
    """Where one worker's new tensors are, also after old ones have got other memory.

    Args:
        schedule: what the worker sends, receives and keeps.
        sources, targets: the old and the new tensors that the migration is prepared with.

    Raises:
        MigrationError: a new tensor would be written to in memory that an old one uses.
    """

    def __init__(
        self,
        worker: int,
        schedule: Schedule,
        sources: Mapping[Shard, torch.Tensor],
        targets: Mapping[Shard, torch.Tensor],
    ) -> None:
        self._worker = worker
        self._targets = dict(targets)
        self._received = {
            Shard(transfer.tensor, transfer.target_box)
            for scheduled in schedule.rounds
            for message in scheduled.receives
            for transfer in message.transfers
        }
        self._local: dict[Shard, list[Refer]] = defaultdict(list)
        for refer in schedule.refers:
            self._local[Shard(refer.tensor, refer.target_box)].append(refer)
        # The new tensors that reuse an old tensor's memory, whole or in part.
        self._borrowed = {shard for shard, tensor in targets.items() if not self._is_written(shard, tensor, sources)}
        self._check(sources, self._targets)

    def after(self, sources: Mapping[Shard, torch.Tensor]) -> dict[Shard, torch.Tensor]:
        """The new tensors, given that the old tensors are now `sources`.

        Raises:
            MigrationError: a new tensor would be written to in memory that an old one uses.
        """
        targets = {
            shard: self._where_it_is(shard, tensor, sources) if shard in self._borrowed else tensor
            for shard, tensor in self._targets.items()
        }
        self._check(sources, targets)
        return targets

    def _where_it_is(
        self, shard: Shard, tensor: torch.Tensor, sources: Mapping[Shard, torch.Tensor]
    ) -> torch.Tensor:
        refers = self._local[shard]
        if all(same_memory(_source_of(refer, sources), _part(refer, tensor)) for refer in refers):
            return tensor
        if len(refers) == 1 and refers[0].box == shard.box:
            source = _source_of(refers[0], sources)
            if source.stride() == tensor.stride() and source.device == tensor.device:
                return source
        # Memory of its own with the strides that were prepared: replicas on other workers have the same strides.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _is_written(self, shard: Shard, tensor: torch.Tensor, sources: Mapping[Shard, torch.Tensor]) -> bool:
        if shard in self._received:
            return True
        return not all(same_memory(_source_of(refer, sources), _part(refer, tensor)) for refer in self._local[shard])

    def _check(self, sources: Mapping[Shard, torch.Tensor], targets: Mapping[Shard, torch.Tensor]) -> None:
        used = Spans(sources.items())
        for shard, tensor in targets.items():
            # A new tensor that nobody sends to and that is made of nothing is empty.
            if shard in self._borrowed or (found := used.overlapping(tensor)) is None:
                continue
            raise MigrationError(
                f"worker {self._worker}: new shard of {describe(shard.tensor, shard.box)} lies in memory that the old "
                f"shard of {describe(found.tensor, found.box)} uses, and would be written to before the "
                "commit; let build() make new tensors each time, and keep none from one generation for the next"
            )


def _source_of(refer: Refer, sources: Mapping[Shard, torch.Tensor]) -> torch.Tensor:
    return sources[Shard(refer.tensor, refer.source_box)][refer.box.within(refer.source_box)]


def _part(refer: Refer, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[refer.box.within(refer.target_box)]
