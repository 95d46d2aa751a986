"""Serving a TCPStore at one address only; by itself torch listens on every interface of the host."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore

from etc_agent.rendezvous.addresses import listen_for
from etc_agent.rendezvous.ports import ANY_PORT, PortRange


def serve_store(address: str, timeout_s: float, ports: PortRange = ANY_PORT) -> TCPStore:
    """A new store on a free one of `ports` at `address`, or at every address where this host does not have that one.

    Raises:
        EtcError: none of the ports is free.
    """
    listener = listen_for(address, ports)
    host, port = listener.getsockname()[:2]
    return TCPStore(
        "localhost" if host in ("::", "0.0.0.0") else address, port, is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s), master_listen_fd=listener.detach(),
    )
