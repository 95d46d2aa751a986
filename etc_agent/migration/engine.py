"""Runs one worker's part of a migration plan on real tensors.

Every worker derives the same messages from the plan (`schedule`). In a run, the receives and sends of a round are
posted together, and the next round is posted before the last one is waited for; so no pair of workers ever waits for
another pair, and the wire does not idle between rounds:

    post 0 . copy what stays . post 1 . finish 0 . post 2 . finish 1 . ... . finish n-1

A worker that sends on what it has received (a plan made with ``forwarding``) finishes a round before it posts the one
that does so. No circle of waits can form: a round needs no more than that all workers have finished the one before.

A contiguous box travels from tensor to tensor in place. Small boxes, and boxes that are not contiguous in their shard,
pass through a staging buffer; each of the two rounds in flight has its own. Workers of one host whose new tensors lie
in shared memory write into them directly (`shared`). Where old and new state do not fit together, memory comes and
goes with the rounds (`storage`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from etc_agent.migration.check import check_tensors, describe, needed_shards
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory.binding import Binder, BoundMessage, BoundRound, LocalCopies, SharedPlaces
from etc_agent.migration.memory.bits import copy_bits
from etc_agent.migration.memory.rebinding import NewPlaces, rebound_shards
from etc_agent.migration.memory.shared import PeerTensors, SharedMemory, arena_bytes
from etc_agent.migration.memory.storage import Held, Storage
from etc_agent.migration.report import MigrationReport, SpanRecorder
from etc_agent.migration.schedule import WINDOW, Message, Schedule, schedule_for
from etc_agent.migration.transport.neighbours import Neighbours, find_neighbours
from etc_agent.migration.transport.peers import Peers
from etc_agent.migration.transport.staging import Staging
from etc_agent.migration.transport.wire import Operation, Wire, Work
from etc_agent.migration.verify import BoxHashes
from etc_agent.planner.plan import MigrationPlan
from etc_agent.state.layout import Shard

Progress = Callable[[int, int], None]
"""Told the bytes that this worker has sent and received so far, and those it will have in the end."""


class Migration:
    """One worker's part of a plan in `keep` mode: prepared beside training, run while training stands still.

    Every worker of the plan must call `prepare` and then `run`; each of them may be called from any thread.

    Args:
        plan: the same plan on every worker.
        worker: this worker's number in the plan.
        sources: the old local tensors by shard; empty for a worker that joins. Read only.
        targets: the new local tensors by shard; empty for a worker that leaves. The target of a whole `Refer` either
            shares its source's memory (nothing is copied) or has its own (it is copied).
        group: a raw c10d backend over the plan's workers, rank = worker number. No other thread may use it for
            point-to-point meanwhile.
        timeout_s: longest time in which no message completes before the migration is given up.
        memory: where `targets` were allocated, if peers on this host may write into them (`shared`).
        verify: hash every box where it leaves and where it arrives, and compare.

    Raises:
        MigrationError: a tensor is not what the plan says of it; the message names worker, tensor and box.
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
        self._setup(plan, worker, Held(sources, targets), group, timeout_s, verify)
        self._places = NewPlaces(worker, self._schedule, sources, targets)
        self._device = _device_of((*sources.values(), *targets.values()))
        self._memory = memory
        self._rounds: list[BoundRound] = []
        self._local = LocalCopies((), ())

    def _setup(
        self, plan: MigrationPlan, worker: int, storage: Storage, group: Any, timeout_s: float, verify: bool
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._storage = storage
        self._wire = Wire(group)
        if self._wire.size != plan.num_workers:
            raise MigrationError(
                f"worker {worker}: the plan is for {plan.num_workers} workers, the process group has {self._wire.size}"
            )
        self._peers = Peers(plan, worker, self._wire, timeout_s)
        self._schedule = schedule_for(plan, worker)
        self._shared: SharedPlaces | None = None
        self._staging: Staging | None = None
        self._hashes = BoxHashes() if verify else None

    @property
    def staging_bytes(self) -> int:
        """Memory that the migration holds beside the old and the new state."""
        return self._staging.num_bytes if self._staging else 0

    @property
    def targets(self) -> dict[Shard, torch.Tensor]:
        """The new local tensors, complete after `run`."""
        return self._storage.targets

    def prepare(self) -> None:
        """Agree on the plan with every other worker, warm the connections, map shared memory, allocate and touch the
        staging buffers.

        Raises:
            MigrationError: a worker has another plan, cannot take part, or does not answer in time.
        """
        file = self._memory.file if self._memory else None
        neighbours = find_neighbours(
            self._plan, self._worker, self._peers, file, partial(arena_bytes, self._plan), wanted=self._can_share()
        )
        if self._memory is not None:
            self._memory.close()
        self._share(neighbours, PeerTensors(self._plan, neighbours.mapped))
        self._peers.meet(self._schedule)
        self._bind()

    def refresh(self, sources: Mapping[Shard, torch.Tensor]) -> frozenset[Shard]:
        """Take the old tensors as they are now. Costs next to nothing where every one still has its memory.

        A target that was its old tensor's memory is where that tensor is now (`targets`): what it was before may be
        in use by the script, and is not written to.

        Returns:
            The shards whose tensors have other memory than before.

        Raises:
            MigrationError: as for the constructor.
        """
        rebound = rebound_shards(self._worker, self._storage.sources, sources)
        if rebound:
            check_tensors(self._worker, "old", self._old_shards, sources)
            self._storage.targets = self._places.after(sources)
            self._storage.sources = dict(sources)
            if self._staging is not None:
                self._bind()
        return rebound

    def run(self, progress: Progress | None = None) -> MigrationReport:
        """Move everything. Returns when this worker has sent and received all that the plan says.

        Raises:
            MigrationError: a peer was lost or too slow. Targets are then undefined, sources untouched.
        """
        if self._staging is None:
            raise MigrationError(f"worker {self._worker}: run() needs prepare() on every worker first")
        recorder = SpanRecorder()
        self._storage.note()
        tally = _Tally(self._schedule, progress)
        start = time.perf_counter()
        with self._stream():
            self._before_rounds(recorder)
            in_flight = self._post(0, recorder)
            self._beside_rounds(recorder)
            for number in range(len(self._schedule.rounds)):
                assert in_flight is not None
                if self._waits_before(number + 1):
                    self._finish(number, in_flight, tally, recorder)
                    in_flight = self._post(number + 1, recorder)
                else:
                    following = self._post(number + 1, recorder)
                    self._finish(number, in_flight, tally, recorder)
                    in_flight = following
            self._settle_copies()
            if self._hashes is not None:
                with recorder.span("verify"):
                    self._hashes.compare(self._worker, self._wire, self._peers.wait)
        self._storage.note()
        return MigrationReport(
            seconds=time.perf_counter() - start,
            sent_bytes=tally.sent_bytes,
            received_bytes=tally.received_bytes,
            referred_bytes=sum(r.box.num_elements * r.tensor.itemsize for r in self._schedule.refers),
            rounds=len(self._schedule.rounds),
            spans=tuple(recorder.spans),
            timeline=tuple(self._storage.timeline),
        )

    def close(self) -> None:
        """Take no further part: workers of this host that wait for this one hear of it. The tensors stay."""
        self._wire.bells.close()

    # -- what differs between the modes

    def _bind(self) -> None:
        self._allocate_staging()
        assert self._staging is not None
        binder = self._binder()
        self._rounds = [binder.bind(r, self._staging.slot(number)) for number, r in enumerate(self._schedule.rounds)]
        self._local = binder.bind_local(self._schedule.refers)

    def _before_rounds(self, recorder: SpanRecorder) -> None:
        """Work that comes before the first message."""

    def _beside_rounds(self, recorder: SpanRecorder) -> None:
        """Work while the first messages are on their way."""
        with recorder.span("local copies"):
            copy_bits(self._local.copy_to, self._local.copy_from)

    def _take(self, number: int) -> BoundRound:
        """The memory of a round that is about to be posted."""
        return self._rounds[number]

    def _done(self, number: int) -> None:
        """A round's messages and copies are done."""

    # -- rounds

    def _post(self, number: int, recorder: SpanRecorder) -> _InFlight | None:
        if number >= len(self._schedule.rounds):
            return None
        with recorder.span(f"post round {number}"):
            bound = self._take(number)
            receives = [(b.message.peer, b.message.tag, b.buffer) for b in bound.receives]
            received, sent = self._wire.post(receives, map(self._packed, bound.sends))
        return _InFlight(bound, received, sent)

    def _waits_before(self, number: int) -> bool:
        """Whether a round sends on what may come in the one before it."""
        return number < len(self._schedule.rounds) and self._schedule.rounds[number].forwards

    def _packed(self, bound: BoundMessage) -> Operation:
        if bound.copy_to:
            copy_bits(bound.copy_to, bound.copy_from)
            self._settle_copies()
        if self._hashes is not None:
            for transfer in bound.message.transfers:
                self._hashes.sending(transfer, self._binder().source_view(transfer))
        return bound.message.peer, bound.message.tag, bound.buffer

    def _finish(self, number: int, in_flight: _InFlight, tally: _Tally, recorder: SpanRecorder) -> None:
        with recorder.span(f"finish round {number}"):
            self._wait_for(number, in_flight, tally)

    def _wait_for(self, number: int, in_flight: _InFlight, tally: _Tally) -> None:
        for b, work in zip(in_flight.bound.receives, in_flight.received, strict=True):
            self._peers.wait(work, f"round {number}: receiving {contents(b.message)} from worker {b.message.peer}")
            copy_bits(b.copy_to, b.copy_from)
            tally.received(b.message)
            if self._hashes is not None:
                self._settle_copies()
                for transfer in b.message.transfers:
                    self._hashes.received(transfer, self._binder().target_view(transfer))
        for b, work in zip(in_flight.bound.sends, in_flight.sent, strict=True):
            self._peers.wait(work, f"round {number}: sending {contents(b.message)} to worker {b.message.peer}")
            tally.sent(b.message)
        self._settle_copies()
        self._done(number)

    # -- helpers

    def _can_share(self) -> bool:
        """Whether all that this worker receives lies where peers can write to."""
        messages = (message for scheduled in self._schedule.rounds for message in scheduled.receives)
        received = {Shard(t.tensor, t.target_box) for message in messages for t in message.transfers}
        memory = self._memory
        return memory is not None and all(memory.holds(shard, self._storage.target(shard)) for shard in received)

    def _share(self, neighbours: Neighbours, places: SharedPlaces) -> None:
        self._wire.bells = neighbours.bells
        self._shared = places
        self._schedule = schedule_for(self._plan, self._worker, neighbours.pairs)

    def _binder(self) -> Binder:
        return Binder(self._storage.source, self._storage.target, self._wire.device.type, self._shared)

    def _allocate_staging(self) -> None:
        binder = self._binder()
        needs = [binder.staging_need_bytes(scheduled) for scheduled in self._schedule.rounds]
        if self._staging is None or not self._staging.fits(needs):
            pinned = self._device.type == "cuda" and self._wire.device.type == "cpu"
            self._staging = Staging(needs, WINDOW, self._wire.device, pinned=pinned)

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        """A stream of its own on a GPU, ordered after all that training has queued."""
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(stream)

    def _settle_copies(self) -> None:
        """The host is about to read, or to reuse, what a device copies."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@dataclass(frozen=True, slots=True)
class _InFlight:
    bound: BoundRound
    received: list[Work]
    sent: list[Work]


class _Tally:
    """Payload moved so far."""

    def __init__(self, schedule: Schedule, progress: Progress | None) -> None:
        messages = [m for r in schedule.rounds for m in (*r.sends, *r.receives)]
        self._total_bytes = sum(message.payload_bytes for message in messages)
        self._progress = progress
        self.sent_bytes = 0
        self.received_bytes = 0

    def sent(self, message: Message) -> None:
        self.sent_bytes += message.payload_bytes
        self._tell()

    def received(self, message: Message) -> None:
        self.received_bytes += message.payload_bytes
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.sent_bytes + self.received_bytes, self._total_bytes)


def _device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The GPU where any of the state is on one; optimizers keep some scalars on the host."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


def contents(message: Message) -> str:
    first = describe(message.transfers[0].tensor, message.transfers[0].box)
    return first if len(message.transfers) == 1 else f"{first} and {len(message.transfers) - 1} more"
