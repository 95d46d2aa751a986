"""One worker's part of a plan as messages: what goes over the wire, under which tag, packed how.

Both ends of a pair derive the same messages from the plan alone. A transfer of at least `DIRECT_BYTES` is a message of
its own, so that it can be sent and received in place; the smaller ones of one pair and round share a message. Each end
decides for itself how it gets the bytes into or out of its tensors (in place or through a staging buffer).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from etc_agent.planner.transfers.plan import MigrationPlan, Refer, Transfer

DIRECT_BYTES = 128 << 10
"""Below this, a copy into a shared buffer costs less than a message of its own (about 60 us with gloo)."""

WINDOW = 2
"""Rounds in flight together."""

ALIGN_BYTES = 16
"""Start of each item of a packed message: the largest item size."""


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes from or to one peer. `starts_bytes` has one start per transfer; `tag` counts per directed pair from 1.

    `shared`: the sender writes into the receiver's memory itself, and the message only says that it has.
    """

    peer: int
    tag: int
    transfers: tuple[Transfer, ...]
    starts_bytes: tuple[int, ...]
    num_bytes: int
    shared: bool

    @property
    def payload_bytes(self) -> int:
        """Without the padding between items."""
        return sum(transfer.num_bytes for transfer in self.transfers)


@dataclass(frozen=True, slots=True)
class Round:
    """What one worker sends and receives in one round, each in the order of posting."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]

    @property
    def forwards(self) -> bool:
        """Whether a message sends on what an earlier round has brought."""
        return any(transfer.forwarded for message in self.sends for transfer in message.transfers)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that one worker does in a migration."""

    refers: tuple[Refer, ...]
    rounds: tuple[Round, ...]

    @property
    def send_peers(self) -> list[int]:
        return sorted({message.peer for scheduled in self.rounds for message in scheduled.sends})

    @property
    def receive_peers(self) -> list[int]:
        return sorted({message.peer for scheduled in self.rounds for message in scheduled.receives})


def schedule_for(plan: MigrationPlan, worker: int, shared_pairs: Collection[tuple[int, int]] = ()) -> Schedule:
    """The part of `plan` that `worker` executes. Linear in the number of the plan's instructions.

    `shared_pairs`: (source, target) whose source writes into the target's memory.
    """
    rounds = [[t for t in transfers if worker in (t.source, t.target)] for transfers in plan.rounds]
    return _schedule(worker, [refer for refer in plan.refers if refer.worker == worker], rounds, shared_pairs)


def schedules_for(plan: MigrationPlan, shared_pairs: Collection[tuple[int, int]] = ()) -> list[Schedule]:
    """`schedule_for` every worker, in one pass over the plan."""
    workers = range(plan.num_workers)
    rounds: list[list[list[Transfer]]] = [[[] for _ in plan.rounds] for _ in workers]
    refers: list[list[Refer]] = [[] for _ in workers]
    for number, transfers in enumerate(plan.rounds):
        for transfer in transfers:
            for worker in {transfer.source, transfer.target}:
                rounds[worker][number].append(transfer)
    for refer in plan.refers:
        refers[refer.worker].append(refer)
    return [_schedule(worker, refers[worker], rounds[worker], shared_pairs) for worker in workers]


def _schedule(
    worker: int,
    refers: Sequence[Refer],
    rounds: Sequence[Sequence[Transfer]],
    shared_pairs: Collection[tuple[int, int]],
) -> Schedule:
    next_tag: dict[tuple[int, int], int] = defaultdict(lambda: 1)
    scheduled = []
    for transfers in rounds:
        by_pair: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for transfer in transfers:
            if transfer.num_bytes:
                by_pair[transfer.source, transfer.target].append(transfer)
        sends: list[Message] = []
        receives: list[Message] = []
        for (source, target), items in by_pair.items():
            mine, peer = (sends, target) if source == worker else (receives, source)
            shared = (source, target) in shared_pairs
            for group in [items] if shared else _grouped(items):
                mine.append(_message(peer, next_tag[source, target], group, shared))
                next_tag[source, target] += 1
        scheduled.append(Round(tuple(sends), tuple(receives)))
    return Schedule(tuple(refers), tuple(scheduled))


def _grouped(transfers: Sequence[Transfer]) -> list[Sequence[Transfer]]:
    """Transfers in groups, the small ones first, so that they are unpacked while the large ones are still arriving."""
    small = [transfer for transfer in transfers if transfer.num_bytes < DIRECT_BYTES]
    large = [(transfer,) for transfer in transfers if transfer.num_bytes >= DIRECT_BYTES]
    return [small, *large] if small else [*large]


def _message(peer: int, tag: int, transfers: Sequence[Transfer], shared: bool) -> Message:
    starts, end = [], 0
    for transfer in transfers:
        start = aligned(end)
        starts.append(start)
        end = start + transfer.num_bytes
    return Message(peer, tag, tuple(transfers), tuple(starts), end, shared)


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to `ALIGN_BYTES`."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
