"""Retiring a generation that is no longer in force: its groups, sockets, threads and memory are freed in the
background.
"""

from __future__ import annotations

import gc
import logging
import threading
from dataclasses import dataclass

import torch.distributed as dist

from etc_agent.errors import one_line
from etc_agent.torch_private.imports import import_compiler
from etc_agent.worker.change.prepared import PreparedGeneration
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.world.swap import World

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Retired:
    """What is left of a change. `old`: the generation that was left, None on a worker that joined, and where the change
    failed. `is_entered`: the prepared generation is in force, so only what the switch needed is to be freed.

    `last_sends`: messages to workers that leave or join, not yet complete, over the change's group.
    """

    old: LiveGeneration | None
    prepared: PreparedGeneration
    last_sends: list[dist.Work]
    is_entered: bool = True


def exclude_from_collection() -> None:
    """Exclude all objects that exist now from later garbage collections: mostly modules, some 300,000 objects.

    Retiring a generation needs a full collection. It holds the interpreter lock, so without this it would stop the
    first steps of the new generation for as long as visiting every object takes.
    """
    # The first optimizer step would import this anyway; it has most of the objects.
    import_compiler()
    gc.collect()
    gc.freeze()


class Retirements:
    """Generations that are being freed: until that is done their memory counts as in use."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_left = 0

    def announce(self) -> None:
        """Announce that a generation is no longer in force; a call of `retire` follows."""
        with self._changed:
            self._num_left += 1

    def retire(self, retired: Retired) -> None:
        """Free an announced generation on a separate thread; the caller must keep no reference to any part of it."""
        threading.Thread(target=self._retire, args=(retired,), name="etc-retire", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all announced generations are freed; returns whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_left, timeout_s)

    def _retire(self, retired: Retired) -> None:
        groups = _groups_of(retired)
        try:
            worlds = _free_memory(retired)
        finally:
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()
        # Nobody waits for what follows: it may take until the timeout of a group, of which gloo has lost an operation.
        for work in retired.last_sends:
            try:
                work.wait()
            except RuntimeError as error:
                _log.info("a worker left before it was told to: %s", one_line(error))
        retired.last_sends.clear()
        for world in worlds:
            world.close()
        worlds.clear()
        gc.collect()
        while groups:
            # Here and not in a garbage collection, which would stand still in the whole process meanwhile.
            groups.pop()


def _groups_of(retired: Retired) -> list[dist.ProcessGroup]:
    """The groups that are to be closed. Whoever drops the last reference to one waits for the operations in it."""
    groups = [retired.prepared.group]
    # The world in `next` is the one in force now, if it was entered.
    for live in (retired.old, None if retired.is_entered else retired.prepared.next):
        groups += live.groups if live is not None else []
    return groups


def _free_memory(retired: Retired) -> list[World]:
    """Free what takes memory; returns the worlds that are left to be closed."""
    worlds = []
    if retired.old is not None:
        if retired.old.copier is not None:
            retired.old.copier.close()
        worlds.append(retired.old.world)
        retired.old = None
    prepared = retired.prepared
    if prepared.next is not None and not retired.is_entered:
        worlds.append(prepared.next.world)
    prepared.next = None
    prepared.close()
    # Modules, schedules and hooks form reference cycles, and a group keeps its sockets and threads until collected.
    gc.collect()
    return worlds
