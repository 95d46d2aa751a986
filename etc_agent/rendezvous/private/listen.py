"""Where a private etcd listens: on a Unix socket, for users who can enter its folder, or on a TCP port, for
everybody."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from pathlib import Path

from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.etcd.transport import Tls

# Below the usual range of ephemeral ports, so that no outgoing connection has the port when etcd wants it back.
_PORTS = range(18000, 32000)


@dataclass(frozen=True, slots=True)
class Urls:
    """The URLs that etcd listens on, and `endpoint`, which clients use."""

    client: str
    peer: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class OnSocket:
    """A Unix socket in `folder`: whoever can enter the folder has full access to this etcd, and nobody else has any.
    The folder's path must be short (`places.socket_folder`)."""

    folder: Path

    def pick(self, peer_port: int | None) -> Urls:
        # etcd 3.4 takes no path in such a URL: a name relative to the folder it runs in, which must look like a port's.
        return Urls("unix://etcd.sock:0", "unix://peer.sock:0", f"unix://{self.folder}/etcd.sock:0")


@dataclass(frozen=True, slots=True)
class OnPort:
    """A free TCP port of `host`; other members of the cluster reach it over loopback. `tls`: certificate and key files
    of etcd itself, with which clients use https."""

    host: str = "127.0.0.1"
    tls: Tls | None = None

    def pick(self, peer_port: int | None) -> Urls:
        endpoint = f"{bracketed(self.host)}:{free_port(self.host)}"
        scheme = "https" if self.tls else "http"
        return Urls(f"{scheme}://{endpoint}", f"http://127.0.0.1:{peer_port or free_port()}", endpoint)


Listen = OnSocket | OnPort
ON_LOOPBACK = OnPort()


def bracketed(host: str) -> str:
    """`host` as written before a colon and a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port on which nothing listens now. Another process may take it first: be ready to try again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(1000):
        port = random.choice(_PORTS)
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise EtcdError(f"no free TCP port between {_PORTS.start} and {_PORTS.stop} on {host}")
