"""Landing areas: shared buffers of one worker into which senders of the same host write, in `release` mode.

In this mode new tensors cannot be shared themselves: they are filled by moving pages of old tensors to them (`mremap`),
and shared pages cannot be moved. So messages pass through a shared buffer, the landing area. The messages of one round
lie in it one after the other, and each of the rounds in flight has its own part of it. A message is copied twice, once
by each end; over loopback the kernel would copy it twice, plus once or twice more for boxes that are not contiguous.

The sender rings a bell when a message has been written. Before a later round may reuse a part of the area, the receiver
rings a bell in the other direction (the *clearance*) to say that the earlier round has been copied out of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from etc_agent.migration.memory.bits import bits_at, touch
from etc_agent.migration.memory.memory_file import MemoryFile
from etc_agent.migration.schedule import WINDOW, Message, Schedule, aligned, schedule_for
from etc_agent.migration.transport.bells import Bells, Rung
from etc_agent.migration.transport.neighbours import Neighbours, find_neighbours, pairs_of_hosts
from etc_agent.migration.transport.peers import Peers
from etc_agent.migration.transport.places import Places, tell_places
from etc_agent.planner.transfers.plan import MigrationPlan

_CLEARANCE_TAG = 1 << 24
"""Added to a message's tag to make the tag of its clearance; larger than any message tag."""


@dataclass(frozen=True, slots=True)
class Area:
    """The layout of a worker's landing area: the offset in bytes of each message, by sender and tag."""

    starts: Mapping[tuple[int, int], int]
    num_bytes: int

    def places(self, message: Message) -> list[int]:
        """Where each box of a received message starts."""
        start = self.starts[message.peer, message.tag]
        return [start + begin for begin in message.starts_bytes]


def area_of(schedule: Schedule) -> Area:
    """The landing area of the worker that executes `schedule`."""
    ends, in_slot = [0] * WINDOW, {}
    for number, scheduled in enumerate(schedule.rounds):
        end = 0
        for message in scheduled.receives:
            if message.shared:
                in_slot[message.peer, message.tag] = (number % WINDOW, end)
                end += aligned(message.num_bytes)
        ends[number % WINDOW] = max(ends[number % WINDOW], end)
    first = [sum(ends[:slot]) for slot in range(WINDOW)]
    return Area({key: first[slot] + start for key, (slot, start) in in_slot.items()}, sum(ends))


@dataclass(frozen=True, slots=True)
class Landing:
    """The landing areas that one worker reads from (its own) and writes to (its peers')."""

    neighbours: Neighbours = field(default_factory=Neighbours)
    mine: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    my_area: Area = field(default_factory=lambda: Area({}, 0))
    theirs: Mapping[int, torch.Tensor] = field(default_factory=dict)
    places: Places = field(default_factory=dict)

    def outgoing(self, message: Message) -> tuple[torch.Tensor, ...]:
        return _items(self.theirs[message.peer], self.places[message.peer, message.tag], message)

    def incoming(self, message: Message) -> tuple[torch.Tensor, ...]:
        return _items(self.mine, self.my_area.places(message), message)


def share_landing(plan: MigrationPlan, worker: int, peers: Peers, *, wanted: bool) -> Landing:
    """Agree with every other worker on the plan and on whose landing areas are shared. Collective.

    Args:
        wanted: whether this worker can share at all.

    Raises:
        MigrationError: as for `Peers.agree`.
    """
    all_pairs = pairs_of_hosts(plan, ["any"] * plan.num_workers)
    # An upper bound, whoever shares in the end. Pages that are never written take no memory.
    size = area_of(schedule_for(plan, worker, all_pairs)).num_bytes
    file = None
    if wanted and size:
        try:
            file = MemoryFile(size)
        except OSError:
            wanted = False
    neighbours = find_neighbours(plan, worker, peers, file, wanted=wanted)
    schedule = schedule_for(plan, worker, neighbours.pairs)
    area = area_of(schedule)
    mine = torch.empty(0, dtype=torch.uint8)
    if file is not None and area.num_bytes:
        # A child process that was forked meanwhile keeps the file mapped for as long as it lives.
        mine = torch.frombuffer(file.memory.part(0, size, gives_back=True), dtype=torch.uint8)
        touch(mine[: area.num_bytes])
    theirs = {target: torch.frombuffer(memory, dtype=torch.uint8) for target, memory in neighbours.mapped.items()}
    places = tell_places(peers, schedule, area.places)
    return Landing(neighbours, mine, area, theirs, places)


class Clearances:
    """When a worker may write to its peers' landing areas. The first `WINDOW` rounds need no clearance: areas are
    empty.
    """

    def __init__(self, bells: Bells, schedule: Schedule) -> None:
        self._bells = bells
        self._rounds = schedule.rounds
        later = self._rounds[WINDOW:]
        self._needed = {(m.peer, m.tag) for scheduled in later for m in scheduled.sends if m.shared}

    def of(self, message: Message) -> Rung | None:
        """What to wait for before writing `message`; None where its place in the area has not been used before."""
        if (message.peer, message.tag) not in self._needed:
            return None
        return Rung(self._bells, message.peer, _CLEARANCE_TAG + message.tag)

    def grant(self, number: int) -> None:
        """Tell the senders of round `number` that their place is free. A dead sender is noticed elsewhere."""
        for message in self._rounds[number].receives if number < len(self._rounds) else ():
            if message.shared:
                with contextlib.suppress(RuntimeError):
                    self._bells.ring(message.peer, _CLEARANCE_TAG + message.tag)


def _items(memory: torch.Tensor, starts: Sequence[int], message: Message) -> tuple[torch.Tensor, ...]:
    items = zip(starts, message.transfers, strict=True)
    return tuple(bits_at(memory, start, t.box.shape, t.tensor.itemsize) for start, t in items)
