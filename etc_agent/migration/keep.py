"""`keep` mode: old and new state fit into memory together, and the old one stays whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from etc_agent.migration.check import check_tensors, needed_shards
from etc_agent.migration.engine import Party, Run
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory.binding import Binder, BoundRound, LocalCopies, SharedPlaces
from etc_agent.migration.memory.bits import copy_bits
from etc_agent.migration.memory.rebinding import NewPlaces, OldPlaces
from etc_agent.migration.memory.shared import PeerTensors, SharedMemory
from etc_agent.migration.memory.spans import storage_bytes
from etc_agent.migration.protocol import Progress
from etc_agent.migration.report import MemoryPoint, MigrationReport
from etc_agent.migration.schedule import Message
from etc_agent.migration.transport.neighbours import find_neighbours
from etc_agent.migration.transport.places import tell_places
from etc_agent.migration.transport.staging import Staging
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.layout import Shard


class KeepingMigration:
    """One worker's part of a plan in `keep` mode (`protocol.Migration`).

    Nothing that the old tensors use is written to, whatever memory they are given between `prepare` and `run`.

    Args:
        plan: the same plan on every worker.
        worker: this worker's number in the plan.
        sources: the old local tensors by shard; empty for a worker that joins. Read only.
        targets: the new local tensors by shard; empty for a worker that leaves. One that is a part of its old tensor's
            memory is not copied; any other has to have memory that no old tensor uses.
        group: a raw c10d backend over the plan's workers, rank = worker number. No other thread may use it for
            point-to-point meanwhile.
        timeout_s: longest time in which no message completes before the migration fails.
        memory: where `targets` were allocated, if peers on this host may write into them.
        verify: hash every box where it leaves and where it arrives, and compare.

    Raises:
        MigrationError: a tensor is not what the plan says of it, or a new one lies in memory of an old one that would
            be written to; the message names worker, tensor and box.
    """

    def __init__(
        self,
        plan: MigrationPlan,
        worker: int,
        sources: Mapping[Shard, torch.Tensor],
        targets: Mapping[Shard, torch.Tensor],
        group: Any,
        *,
        timeout_s: float,
        memory: SharedMemory | None = None,
        verify: bool = False,
    ) -> None:
        self._old_shards, new_shards = needed_shards(plan, worker)
        check_tensors(worker, "old", self._old_shards, sources)
        check_tensors(worker, "new", new_shards, targets)
        device = _device_of((*sources.values(), *targets.values()))
        self._party = Party(plan, worker, group, timeout_s, device, verify=verify)
        self._memory = memory
        self._sources = dict(sources)
        self._old_places = OldPlaces(worker, self._sources)
        self._new_places = NewPlaces(worker, self._party.schedule, sources, targets)
        self._shared: SharedPlaces | None = None
        self._staging: Staging | None = None
        self._held_bytes = storage_bytes((*sources.values(), *targets.values()))
        self._bound: _BoundMemory | None = None
        self.targets: dict[Shard, torch.Tensor] = dict(targets)

    @property
    def staging_bytes(self) -> int:
        return self._staging.num_bytes if self._staging else 0

    def prepare(self) -> None:
        """Agree on the plan with every other worker, make the connections, map shared memory, allocate and touch the
        staging buffers.

        Raises:
            MigrationError: a worker has another plan, cannot take part, or does not answer in time.
        """
        party, memory = self._party, self._memory
        neighbours = find_neighbours(
            party.plan, party.worker, party.peers, memory.file if memory else None, wanted=self._can_share()
        )
        if memory is not None:
            memory.close()
        party.share(neighbours)
        party.peers.meet(party.schedule)
        places = tell_places(party.peers, party.schedule, memory.places if memory is not None else _nowhere)
        self._shared = PeerTensors(neighbours.mapped, places)
        self._bind()

    def refresh(self, sources: Mapping[Shard, torch.Tensor]) -> frozenset[Shard]:
        """Take the old tensors as they are now. A new tensor that was a part of its old one's memory is where that is
        now: see `targets`."""
        rebound = self._old_places.rebound(sources)
        if rebound:
            check_tensors(self._party.worker, "old", self._old_shards, sources)
            self.targets = self._new_places.after(sources)
            self._sources = dict(sources)
            self._old_places = OldPlaces(self._party.worker, self._sources)
            if self._bound is not None:
                self._bind()
        return rebound

    def run(self, progress: Progress | None = None) -> MigrationReport:
        """Move everything.

        Raises:
            MigrationError: a peer was lost or too slow. New tensors are then undefined, old ones untouched.
        """
        bound = self._bound
        if bound is None:
            raise MigrationError(f"worker {self._party.worker}: run() needs prepare() on every worker first")
        run = Run(self._party, bound, progress)
        begin = MemoryPoint(time.time(), self._held_bytes)

        def copy_locally() -> None:
            with run.span("local copies"):
                copy_bits(bound.local.copy_to, bound.local.copy_from)

        with _own_stream(self._party.device):
            run.rounds(copy_locally)
        return run.report((begin, MemoryPoint(time.time(), self._held_bytes)))

    def close(self) -> None:
        self._party.close()

    def _bind(self) -> None:
        """Make all views of all messages now: thousands, some 10 us each."""
        schedule, wire = self._party.schedule, self._party.wire
        binder = Binder(self._sources.__getitem__, self.targets.__getitem__, wire.device.type, self._shared)
        needs = [binder.staging_need_bytes(each) for each in schedule.rounds]
        self._staging = self._party.staging(needs, self._staging)
        rounds = [binder.bind(each, self._staging.slot(number)) for number, each in enumerate(schedule.rounds)]
        self._bound = _BoundMemory(rounds, binder.bind_local(schedule.refers), binder)

    def _can_share(self) -> bool:
        """Whether all that this worker receives lies where peers can write to."""
        messages = (message for scheduled in self._party.schedule.rounds for message in scheduled.receives)
        received = {Shard(t.tensor, t.target_box) for message in messages for t in message.transfers}
        memory = self._memory
        return memory is not None and all(memory.holds(shard, self.targets[shard]) for shard in received)


@dataclass(frozen=True, slots=True)
class _BoundMemory:
    """Every round's memory, there from the start (`engine.RoundMemory`)."""

    rounds: Sequence[BoundRound]
    local: LocalCopies
    binder: Binder

    def open(self, number: int) -> BoundRound:
        return self.rounds[number]

    def clearance(self, message: Message) -> None:
        """New tensors have their own memory: there is always room."""

    def close(self, number: int) -> None:
        """All of it stays."""


def _device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The GPU where any of the state is on one; optimizers keep some scalars on the host."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A stream of its own on a GPU, ordered after all that training has queued."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def _nowhere(message: Message) -> list[int]:
    raise AssertionError(f"a message from worker {message.peer} is shared, and this worker has no shared memory")
