"""The memory of rounds in `release` mode: allocated when a round begins, freed when it ends."""

from __future__ import annotations

from collections.abc import Collection

from etc_agent.migration.engine import Party
from etc_agent.migration.memory.binding import Binder, BoundRound, LocalCopies
from etc_agent.migration.memory.bits import copy_bits, finish_copies
from etc_agent.migration.memory.carrying import refers_to_carry
from etc_agent.migration.memory.lifetimes import Lifetimes, Step
from etc_agent.migration.memory.storage import OnDemand
from etc_agent.migration.schedule import WINDOW, Message
from etc_agent.migration.transport.landing import Clearances, Landing
from etc_agent.migration.transport.staging import Staging
from etc_agent.migration.transport.wire import Work
from etc_agent.planner.transfers.plan import Refer, Transfer


class ReleasingMemory:
    """The memory of one worker's rounds (`engine.RoundMemory`), created when its peers are known.

    Attributes:
        tensors: the old and the new ones.
        staging: buffers with all pages allocated; the previous ones if they are large enough.
        arrived: what has come into new tensors.
        copied: what has been put into new tensors from old ones of this worker.
    """

    def __init__(
        self, party: Party, lifetimes: Lifetimes, landing: Landing, tensors: OnDemand, staging: Staging | None
    ) -> None:
        self._party = party
        self._lifetimes = lifetimes
        self._clearances = Clearances(party.wire.bells, party.schedule)
        self.tensors = tensors
        self.arrived: list[Transfer] = []
        self.copied: list[Refer] = []
        are_placed = self.tensors.reserve(lifetimes, refers_to_carry(party.schedule))
        self.binder = Binder(self.tensors.source, self.tensors.target, party.wire.device.type, landing)
        needs = [self.binder.staging_need_bytes(each) for each in party.schedule.rounds]
        self.staging = party.staging(needs, staging)
        self._bound: list[BoundRound] | None = None
        self._copies: dict[int, LocalCopies] = {}
        if are_placed:
            self._bind_ahead()

    @property
    def carried(self) -> Collection[Refer]:
        """The local parts whose pages are moved under the new tensor, so that they need no copy."""
        return self.tensors.carried

    def peak_bytes(self) -> int:
        """Most bytes of old and new tensors that will be held at once."""
        freed = self.tensors.freed_bytes(self._lifetimes)
        return self._lifetimes.peak_bytes(self.tensors.old_bytes, freed, WINDOW)

    def hold_to(self, limit_bytes: int, buffers_bytes: int) -> None:
        """Count the buffers as held, and limit old and new tensors, buffers and pooled pages together."""
        self.tensors.held_bytes += buffers_bytes
        self.tensors.limit_bytes = limit_bytes
        self.tensors.note()

    def copy_what_stays(self) -> None:
        """Run the steps without messages, before the first round: one new tensor each."""
        for number, step in enumerate(self._lifetimes.local):
            self._open(step, number - len(self._lifetimes.local))
            finish_copies(self._party.device)
            self.tensors.close(step)

    def open(self, number: int) -> BoundRound:
        self._open(self._lifetimes.rounds[number], number)
        if self._bound is not None:
            return self._bound[number]
        return self.binder.bind(self._party.schedule.rounds[number], self.staging.slot(number))

    def clearance(self, message: Message) -> Work | None:
        return self._clearances.of(message)

    def close(self, number: int) -> None:
        receives = self._party.schedule.rounds[number].receives
        self.arrived += [transfer for message in receives for transfer in message.transfers]
        self.tensors.close(self._lifetimes.rounds[number])
        self._clearances.grant(number + WINDOW)

    def _open(self, step: Step, number: int) -> None:
        self.tensors.open(step)
        local = self._copies.get(number) or self.binder.bind_local(step.refers)
        copy_bits(local.copy_to, local.copy_from)
        self.copied += step.refers

    def _bind_ahead(self) -> None:
        """Make all views now, as the addresses of the new tensors are known: thousands, some 10 us each."""
        rounds = enumerate(self._party.schedule.rounds)
        self._bound = [self.binder.bind(each, self.staging.slot(number)) for number, each in rounds]
        steps = (*self._lifetimes.local, *self._lifetimes.rounds)
        first = -len(self._lifetimes.local)
        for number, step in enumerate(steps, first):
            copied = [refer for refer in step.refers if refer not in self.carried]
            self._copies[number] = self.binder.bind_local(copied)
