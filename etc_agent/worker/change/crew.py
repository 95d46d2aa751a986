"""The crew of a change: all workers that take part in it, and their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from etc_agent.errors import EtcError
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot, node_numbers


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of the previous and of the next generation, as one of them sees them.

    They are numbered as in the migration plan: the workers of the previous generation by their rank in it, without
    those that were lost, then the workers that join by their rank in the next generation. A worker in the slot of a
    lost one joins.

    `slots`: worker -> its slot. `old_ranks`, `next_ranks`: worker -> its rank in the previous and in the next
    generation, None where it joins or leaves. `worker`: this worker's number.
    """

    slots: tuple[Slot, ...]
    old_ranks: tuple[int | None, ...]
    next_ranks: tuple[int | None, ...]
    worker: int

    @classmethod
    def of(cls, slot: Slot, generation: Generation, previous: Generation) -> Crew:
        """The crew of the change from `previous` to `generation`, for the worker in `slot`.

        Raises:
            EtcError: the slot is in neither generation.
        """
        before = {each: rank for rank, each in enumerate(previous.placement) if each not in generation.lost}
        after = {each: rank for rank, each in enumerate(generation.placement)}
        slots = (*before, *(each for each in after if each not in before))
        if slot not in slots:
            raise EtcError(f"slot {slot} is neither in generation {previous.id} nor in {generation.id}")
        return cls(slots, tuple(map(before.get, slots)), tuple(map(after.get, slots)), slots.index(slot))

    @property
    def num_workers(self) -> int:
        return len(self.slots)

    @property
    def old_rank(self) -> int | None:
        """This worker's rank in the previous generation, None where it joins."""
        return self.old_ranks[self.worker]

    @property
    def new_rank(self) -> int | None:
        """This worker's rank in the next generation, None where it leaves."""
        return self.next_ranks[self.worker]

    def has_old_rank(self, rank: int) -> bool:
        """Whether the worker that had `rank` in the previous generation takes part."""
        return rank in self.old_ranks

    @property
    def leaving(self) -> tuple[int, ...]:
        """The numbers of the workers that leave."""
        return tuple(worker for worker, rank in enumerate(self.next_ranks) if rank is None)

    @property
    def joining(self) -> tuple[int, ...]:
        """The numbers of the workers that join."""
        return tuple(worker for worker, rank in enumerate(self.old_ranks) if rank is None)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Worker -> the number of its node; nodes are numbered in the order of their first worker."""
        return node_numbers(self.slots)

    @property
    def num_on_this_node(self) -> int:
        """How many workers of the crew are on this worker's host, itself included."""
        return sum(slot.node == self.slots[self.worker].node for slot in self.slots)
