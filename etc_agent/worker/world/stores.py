"""Clients of a generation's TCPStore, barriers on it, and gloo groups outside every world.

A TCPStore client guards one socket with a mutex, so a thread that waits would block the others: one client per thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from etc_agent.control.redundancy import Redundancy, Scheme
from etc_agent.errors import PeerLostError
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.gloo import RecordedGloo

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.001, 0.1
_OVERSHOOT = 0.1
"""The most that polling adds to the time that the last worker takes to come, as a share of it."""


def raw_group(
    store: dist.Store, rank: int, size: int, timeout_s: float, connections: Connections
) -> dist.ProcessGroup:
    """A gloo group over CPU memory that belongs to no world: for votes and migrations. Collective over its ranks. Its
    connections are noted in `connections`.

    It is a c10d backend: it has the collectives, send and recv of a process group, but no name and no place in a world.
    """
    return cast(dist.ProcessGroup, RecordedGloo(store, rank, size, timedelta(seconds=timeout_s), connections))


def copies_group(
    store: dist.Store, rank: int, size: int, redundancy: Redundancy, timeout_s: float, connections: Connections
) -> dist.ProcessGroup | None:
    """The group for copies of a generation's state, None where none are to be made. Collective over its ranks."""
    if redundancy.scheme is Scheme.NONE or size == 1:
        return None
    return raw_group(dist.PrefixStore("copies", store), rank, size, timeout_s, connections)


def connect_store(address: str, timeout_s: float) -> dist.TCPStore:
    """A new client of the TCPStore at ``host:port``.

    Raises:
        PeerLostError: nobody answers there.
    """
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except (dist.DistError, RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PeerLostError(f"the store at {address} does not answer within {timeout_s:g} s: {first}") from None


def meet(
    store: dist.Store, worker: int, num_workers: int, timeout_s: float, check: Callable[[], None]
) -> None:
    """Wait at the store until all workers have come to this barrier: under that prefix, each once.

    `check` is called repeatedly while waiting; an exception that it raises ends the wait.

    Raises:
        PeerLostError: not all came in time; the message names the workers that are missing.
    """
    keys = [str(each) for each in range(num_workers)]
    store.set(keys[worker], "")
    if store.add("count", 1) == num_workers:
        store.set("complete", "1")
    begun = time.monotonic()
    while not store.check(["complete"]):
        check()
        waited_s = time.monotonic() - begun
        if waited_s > timeout_s:
            missing = [str(each) for each, key in enumerate(keys) if not store.check([key])]
            raise PeerLostError(f"worker {', '.join(missing)} of the change did not come within {timeout_s:g} s")
        time.sleep(min(max(_OVERSHOOT * waited_s, _SHORTEST_POLL_S), _LONGEST_POLL_S))
