"""Serving a TCPStore at one address only; by itself torch listens on every interface of the host."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore

from etc_agent.rendezvous.addresses import listen_at


def serve_store(address: str, timeout_s: float) -> TCPStore:
    """A new store on a free port of `address`, or of every address where this host does not have that one."""
    timeout = timedelta(seconds=timeout_s)
    listener = listen_at(address)
    if listener is None:
        return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
