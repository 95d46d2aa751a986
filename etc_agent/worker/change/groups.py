"""The process groups of a change: one over all its workers, and those of the next generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from etc_agent.parallel.generation import Generation
from etc_agent.worker.change.crew import Crew
from etc_agent.worker.settings import Settings
from etc_agent.worker.vote import Vote
from etc_agent.worker.world.build import build
from etc_agent.worker.world.connections import Connections, StoreConnection
from etc_agent.worker.world.stores import connect_store, copies_group, meet, raw_group
from etc_agent.worker.world.swap import World


@dataclass(slots=True, eq=False)
class Groups:
    """`all_workers`: of both generations; the rank is the worker's number in the crew. `world`, `vote`: of the next
    generation, None on a worker that leaves; `copies`: the same, None also where no copies of the state are made."""

    all_workers: dist.ProcessGroup
    world: World | None
    vote: Vote | None
    copies: dist.ProcessGroup | None = None

    def close(self) -> None:
        if self.world is not None:
            self.world.close()


@dataclass(frozen=True, slots=True)
class ChangeConnections:
    """Every connection of a change: to the store, between all its workers, and of the next generation."""

    store: StoreConnection = field(default_factory=StoreConnection)
    all_workers: Connections = field(default_factory=Connections)
    world: Connections = field(default_factory=Connections)
    side: Connections = field(default_factory=Connections)

    def cut(self) -> None:
        """Have every operation of the groups fail that this worker waits in, from any thread. The store's connection is
        left alone."""
        for each in (self.all_workers, self.side, self.world):
            each.cut()

    def hang_up(self) -> None:
        """Have every operation of the groups fail that other workers wait in. This one waits in none."""
        for each in (self.all_workers, self.side, self.world):
            each.hang_up()

    def close(self) -> None:
        """The groups are gone: close what is left of their connections."""
        for each in (self.all_workers, self.side, self.world):
            each.close()


class GroupMaker:
    """Makes a change's groups with a store client of the change's own, and notes all their connections.

    Args:
        check: called repeatedly while waiting for workers; an exception that it raises ends the wait.
    """

    def __init__(
        self, generation: Generation, crew: Crew, settings: Settings,
        connections: ChangeConnections, check: Callable[[], None],
    ) -> None:
        self._generation = generation
        self._crew = crew
        self._settings = settings
        self._connections = connections
        self._check = check

    def make(self) -> Groups:
        """Collective over the crew. All workers meet first, so that no worker waits long inside the making of a group.

        Raises:
            PeerLostError: the store does not answer, or a worker did not come in time; the message names it.
            RuntimeError: a worker was lost.
        """
        store = self._store()
        self._meet(store)
        groups = Groups(self._all_workers(dist.PrefixStore("migration", store)), None, None)
        try:
            if self._crew.new_rank is not None:
                groups.world = self._world(dist.PrefixStore("world", store), self._crew.new_rank)
                groups.vote = self._vote(dist.PrefixStore("vote", store), self._crew.new_rank)
                groups.copies = self._copies(store, self._crew.new_rank)
        except BaseException:
            groups.close()
            raise
        return groups

    def _store(self) -> dist.Store:
        address = self._generation.store
        client = self._connections.store.record(
            lambda: connect_store(address, self._settings.timeout_s), int(address.rpartition(":")[2])
        )
        return dist.PrefixStore(f"gen{self._generation.id}", client)

    def _meet(self, store: dist.Store) -> None:
        crew, timeout_s = self._crew, self._settings.switch_timeout_s
        meet(dist.PrefixStore("arrived", store), crew.worker, crew.num_workers, timeout_s, self._check)

    def _all_workers(self, store: dist.Store) -> dist.ProcessGroup:
        crew, timeout_s = self._crew, self._settings.switch_timeout_s
        return raw_group(store, crew.worker, crew.num_workers, timeout_s, self._connections.all_workers)

    def _world(self, store: dist.Store, rank: int) -> World:
        generation, settings = self._generation, self._settings
        return build(
            store, rank, generation.config, generation.id, settings.device, settings.timeout_s, self._connections.world
        )

    def _vote(self, store: dist.Store, rank: int) -> Vote:
        size, timeout_s = self._generation.config.num_ranks, self._settings.timeout_s
        return Vote(store, rank, size, timeout_s, self._connections.side)

    def _copies(self, store: dist.Store, rank: int) -> dist.ProcessGroup | None:
        size, settings = self._generation.config.num_ranks, self._settings
        return copies_group(store, rank, size, settings.redundancy, settings.timeout_s, self._connections.side)
