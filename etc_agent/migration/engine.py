"""Moves one worker's messages of a migration plan, round by round; the modes say where the bytes are.

Every worker derives the same messages from the plan (`schedule`). The receives and sends of a round are posted
together, and the next round is posted before the last one is waited for; so no pair of workers ever waits for another
pair, and the wire does not idle between rounds:

    post 0 . copy what stays . post 1 . finish 0 . post 2 . finish 1 . ... . finish n-1

A worker that sends on what it has received (a plan made with ``forwarding``) finishes a round before it posts the one
that forwards its data. No cycle of waits can form: a round only requires that all workers have finished the one before.

A contiguous box travels from tensor to tensor in place. Small boxes, and boxes that are not contiguous in their shard,
pass through a staging buffer; each of the two rounds in flight has its own. Workers of one host whose new tensors lie
in shared memory write into them directly (`memory.shared`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from etc_agent.migration.check import describe
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.hashes import BoxHashes
from etc_agent.migration.memory.binding import Binder, BoundMessage, BoundRound
from etc_agent.migration.memory.bits import copy_bits, finish_copies
from etc_agent.migration.protocol import Progress
from etc_agent.migration.report import MemoryPoint, MigrationReport, SpanRecorder
from etc_agent.migration.schedule import WINDOW, Message, Schedule, schedule_for
from etc_agent.migration.transport.neighbours import Neighbours
from etc_agent.migration.transport.peers import Peers
from etc_agent.migration.transport.staging import Staging
from etc_agent.migration.transport.wire import Operation, Wire, Work
from etc_agent.planner.transfers.plan import MigrationPlan


class Party:
    """One worker of a plan, as the others meet it: its connections and its messages.

    Args:
        group: a raw c10d backend over the plan's workers, rank = worker number.
        timeout_s: longest time in which no message completes before the migration fails.
        device: where most of the state is.
        verify: hash every box where it leaves and where it arrives, and compare.

    Raises:
        MigrationError: the group is of another size than the plan.
    """

    def __init__(
        self, plan: MigrationPlan, worker: int, group: Any, timeout_s: float, device: torch.device, *, verify: bool
    ) -> None:
        self.plan = plan
        self.worker = worker
        self.device = device
        self.verify = verify
        self.wire = Wire(group)
        if self.wire.size != plan.num_workers:
            raise MigrationError(
                f"worker {worker}: the plan is for {plan.num_workers} workers, the process group has {self.wire.size}"
            )
        self.peers = Peers(plan, worker, self.wire, timeout_s)
        self.schedule = schedule_for(plan, worker)

    def staging(self, needs_bytes: Sequence[int], previous: Staging | None) -> Staging:
        """Staging buffers for rounds that need so much: the `previous` ones where they are large enough."""
        if previous is not None and previous.fits(needs_bytes):
            return previous
        pinned = self.device.type == "cuda" and self.wire.device.type == "cpu"
        return Staging(needs_bytes, WINDOW, self.wire.device, pinned=pinned)

    def share(self, neighbours: Neighbours) -> None:
        """From now on messages between neighbours go through the memory that they share."""
        self.wire.bells = neighbours.bells
        self.schedule = schedule_for(self.plan, self.worker, neighbours.pairs)

    def close(self) -> None:
        """Close the connections, so that workers of this host which wait for this one fail at once."""
        self.wire.close()


class RoundMemory(Protocol):
    """What `Run` asks of a mode while messages are on their way. `binder` finds the boxes of single transfers."""

    @property
    def binder(self) -> Binder: ...

    def open(self, number: int) -> BoundRound:
        """The memory of a round that is about to be posted."""

    def clearance(self, message: Message) -> Work | None:
        """What to wait for before the bytes of a message are written to the place from which they are sent; None:
        nothing."""

    def close(self, number: int) -> None:
        """All messages and copies of a round are done."""



class Run:
    """One run of one worker's messages.

    Attributes:
        recorder: the spans of this run, for a mode to add to.
    """

    def __init__(self, party: Party, memory: RoundMemory, progress: Progress | None) -> None:
        self.recorder = SpanRecorder()
        self._party = party
        self._memory = memory
        self._tally = _Tally(party.schedule, progress)
        self._hashes = BoxHashes() if party.verify else None
        self._start = time.perf_counter()

    def span(self, name: str) -> AbstractContextManager[None]:
        return self.recorder.span(name)

    def rounds(self, beside: Callable[[], None] = lambda: None) -> None:
        """Move all rounds. `beside`: work to do while the first messages are on their way.

        Raises:
            MigrationError: a peer was lost or too slow, or, with `verify`, a box arrived damaged.
        """
        in_flight = self._post(0)
        beside()
        for number in range(len(self._party.schedule.rounds)):
            assert in_flight is not None
            if self._waits_before(number + 1):
                self._finish(number, in_flight)
                in_flight = self._post(number + 1)
            else:
                following = self._post(number + 1)
                self._finish(number, in_flight)
                in_flight = following
        finish_copies(self._party.device)
        if self._hashes is not None:
            with self.span("verify"):
                self._hashes.compare(self._party.worker, self._party.wire, self._party.peers.wait)

    def report(self, timeline: tuple[MemoryPoint, ...] = ()) -> MigrationReport:
        schedule = self._party.schedule
        return MigrationReport(
            seconds=time.perf_counter() - self._start,
            sent_bytes=self._tally.sent_bytes,
            received_bytes=self._tally.received_bytes,
            referred_bytes=sum(r.box.num_elements * r.tensor.itemsize for r in schedule.refers),
            num_rounds=len(schedule.rounds),
            spans=tuple(self.recorder.spans),
            timeline=timeline,
        )

    def _post(self, number: int) -> _InFlight | None:
        if number >= len(self._party.schedule.rounds):
            return None
        with self.span(f"post round {number}"):
            bound = self._memory.open(number)
            receives = [(b.message.peer, b.message.tag, b.buffer) for b in bound.receives]
            received, sent = self._party.wire.post(receives, map(self._packed, bound.sends))
        return _InFlight(bound, received, sent)

    def _waits_before(self, number: int) -> bool:
        """Whether a round sends on data that may arrive in the round before it."""
        rounds = self._party.schedule.rounds
        return number < len(rounds) and rounds[number].forwards

    def _packed(self, bound: BoundMessage) -> Operation:
        message = bound.message
        if (clearance := self._memory.clearance(message)) is not None:
            self._party.peers.wait(clearance, f"waiting for room for {_contents(message)} at worker {message.peer}")
        if bound.copy_to:
            copy_bits(bound.copy_to, bound.copy_from)
            finish_copies(self._party.device)
        if self._hashes is not None:
            for transfer in message.transfers:
                self._hashes.sending(transfer, self._memory.binder.source_view(transfer))
        return message.peer, message.tag, bound.buffer

    def _finish(self, number: int, in_flight: _InFlight) -> None:
        with self.span(f"finish round {number}"):
            self._wait_for(number, in_flight)

    def _wait_for(self, number: int, in_flight: _InFlight) -> None:
        wait = self._party.peers.wait
        for b, work in zip(in_flight.bound.receives, in_flight.received, strict=True):
            wait(work, f"round {number}: receiving {_contents(b.message)} from worker {b.message.peer}")
            copy_bits(b.copy_to, b.copy_from)
            self._tally.received(b.message)
            if self._hashes is not None:
                finish_copies(self._party.device)
                for transfer in b.message.transfers:
                    self._hashes.received(transfer, self._memory.binder.target_view(transfer))
        for b, work in zip(in_flight.bound.sends, in_flight.sent, strict=True):
            wait(work, f"round {number}: sending {_contents(b.message)} to worker {b.message.peer}")
            self._tally.sent(b.message)
        finish_copies(self._party.device)
        self._memory.close(number)


@dataclass(frozen=True, slots=True)
class _InFlight:
    bound: BoundRound
    received: list[Work]
    sent: list[Work]


class _Tally:
    """The payload bytes moved so far."""

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


def _contents(message: Message) -> str:
    """The first box of a message and the number of the others, for people."""
    first = describe(message.transfers[0].tensor, message.transfers[0].box)
    return first if len(message.transfers) == 1 else f"{first} and {len(message.transfers) - 1} more"
