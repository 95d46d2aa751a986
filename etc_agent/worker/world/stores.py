"""Clients of a generation's store, and gloo groups outside every world.

One TCPStore client is a mutex around one socket, so no two threads may share a client.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch.distributed as dist

from etc_agent.errors import PeerLostError


def raw_group(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """A gloo group outside every world, over CPU memory: for votes and migrations. Collective over its ranks.

    It is a backend; of a process group it has the collectives and send and recv, but no name and no place in a world.
    """
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s)))


def connect_store(address: str, timeout_s: float) -> dist.TCPStore:
    """A client of its own of the TCPStore at ``host:port``.

    Raises:
        PeerLostError: nobody answers there.
    """
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except (dist.DistError, RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PeerLostError(f"the store at {address} does not answer within {timeout_s:g} s: {first}") from None
