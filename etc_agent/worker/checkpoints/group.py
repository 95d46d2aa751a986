"""The process group of one checkpoint: apart from training's, made beside it, and cut at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

import torch.distributed as dist

from etc_agent.worker.world.build import GROUPS_PER_WORLD, init_default_group
from etc_agent.worker.world.connections import Connections, StoreConnection
from etc_agent.worker.world.stores import connect_store
from etc_agent.worker.world.swap import Contents, close_groups, entered_contents

T = TypeVar("T")

_FIRST_NUMBER: Final = 1_000_000_000
"""Beyond those of generations and of worlds without peers."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a generation meet for one checkpoint. `address`: of the store, ``host:port``, or "" where one
    rank has no store; `prefix`: of the keys there, used once."""

    address: str
    prefix: str
    rank: int
    size: int
    timeout_s: float


class SavingGroup:
    """Runs functions in which torch.distributed means a gloo group of the checkpoint's own, in the calling thread."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        self._meeting = meeting
        self._connections, self._store = Connections(), StoreConnection()
        self._contents = Contents((_FIRST_NUMBER + number) * GROUPS_PER_WORLD, self._connections)

    def run(self, work: Callable[[], T]) -> T:
        """Make the group, return ``work()``, and close the group. Collective over the ranks.

        Raises:
            RuntimeError: a rank did not come in time, or was lost; or the group was cut.
        """
        try:
            with entered_contents(self._contents):
                self._make()
                return work()
        finally:
            close_groups(self._contents)

    def cut(self) -> None:
        """Have `run` end soon, with an error. From any thread."""
        self._store.cut()
        self._connections.cut()

    def _make(self) -> None:
        meeting = self._meeting
        store: dist.Store = dist.HashStore()
        if meeting.address:
            port = int(meeting.address.rpartition(":")[2])
            store = self._store.record(lambda: connect_store(meeting.address, meeting.timeout_s), port)
        init_default_group(
            dist.PrefixStore(meeting.prefix, store), meeting.rank, meeting.size, "gloo",
            timedelta(seconds=meeting.timeout_s),
        )
