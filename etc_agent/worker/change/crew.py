"""The crew of a change: all workers that take part in it, and their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from etc_agent.errors import EtcError
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of the previous and of the next generation, as one of them sees them.

    They are numbered as in the migration plan: the workers of the previous generation by their rank in it, then the
    workers that join by their rank in the next generation.

    `slots`: worker -> its slot. `next_ranks`: worker -> its rank in the next generation, None where it leaves.
    `num_previous`: the size of the previous generation. `worker`: this worker's number.
    """

    slots: tuple[Slot, ...]
    next_ranks: tuple[int | None, ...]
    num_previous: int
    worker: int

    @classmethod
    def of(cls, slot: Slot, generation: Generation, previous: Generation) -> Crew:
        """The crew of the change from `previous` to `generation`, for the worker in `slot`.

        Raises:
            EtcError: the slot is in neither generation.
        """
        slots = tuple(dict.fromkeys((*previous.placement, *generation.placement)))
        if slot not in slots:
            raise EtcError(f"slot {slot} is neither in generation {previous.id} nor in {generation.id}")
        ranks = {each: rank for rank, each in enumerate(generation.placement)}
        return cls(slots, tuple(map(ranks.get, slots)), len(previous.placement), slots.index(slot))

    @property
    def num_workers(self) -> int:
        return len(self.slots)

    @property
    def old_rank(self) -> int | None:
        """This worker's rank in the previous generation, None where it joins."""
        return self.worker if self.worker < self.num_previous else None

    @property
    def new_rank(self) -> int | None:
        """This worker's rank in the next generation, None where it leaves."""
        return self.next_ranks[self.worker]

    @property
    def leaving(self) -> tuple[int, ...]:
        """The numbers of the workers that leave."""
        return tuple(worker for worker, rank in enumerate(self.next_ranks) if rank is None)

    @property
    def joining(self) -> tuple[int, ...]:
        """The numbers of the workers that join."""
        return tuple(range(self.num_previous, self.num_workers))

    @property
    def nodes(self) -> tuple[int, ...]:
        """Worker -> the number of its node; nodes are numbered in the order of their first worker."""
        numbers = {node: number for number, node in enumerate(dict.fromkeys(slot.node for slot in self.slots))}
        return tuple(numbers[slot.node] for slot in self.slots)

    @property
    def num_on_this_node(self) -> int:
        """How many workers of the crew are on this worker's host, itself included."""
        return sum(slot.node == self.slots[self.worker].node for slot in self.slots)
