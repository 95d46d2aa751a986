"""A network of our own: hosts that are network namespaces, each with one cable to a common switch.

Every host has a loopback, an address of its own and nothing else, so it meets the others only through its cable, which
can be pulled and made slow. Names and the subnet are drawn at random, so that several networks live beside each other.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace. `cable`: the switch's end of its cable."""

    namespace: str
    address: str
    cable: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command so that it runs on this host; the process keeps its pid."""
        return ("ip", "netns", "exec", self.namespace)


class Network:
    """`num_hosts` hosts and the switch; the machine itself is on the switch too, as `gateway`. Use with `with`.

    Raises:
        OSError: this machine cannot have one; see `why_not`.
    """

    def __init__(self, num_hosts: int) -> None:
        token = secrets.token_hex(3)
        self._switch = f"etb{token}"
        subnet = _free_subnet()
        addresses = subnet.hosts()
        self.gateway = str(next(addresses))
        self.hosts: list[Host] = []
        try:
            _ip("link", "add", self._switch, "type", "bridge")
            _ip("address", "add", f"{self.gateway}/{subnet.prefixlen}", "dev", self._switch)
            _ip("link", "set", self._switch, "up")
            for number in range(num_hosts):
                host = Host(f"etc-{token}-{number}", str(next(addresses)), f"etv{token}{number}")
                self.hosts.append(host)
                self._plug_in(host, subnet.prefixlen)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def why_not() -> str | None:
        """Why this machine cannot have network namespaces; None where it can."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        if shutil.which("ip") is None:
            return "network namespaces need iproute2 (make setup installs it)"
        try:
            Network(1).close()
        except OSError as error:
            return f"network namespaces cannot be made here: {error}"
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def cut(self, host: Host) -> None:
        """Pull the cable: what is under way is lost, and nobody is told."""
        _ip("link", "set", host.cable, "down")

    def heal(self, host: Host) -> None:
        """Plug it in again."""
        _ip("link", "set", host.cable, "up")

    def delay(self, host: Host, milliseconds: float) -> None:
        """Make everything that the switch sends to `host` this late.

        Raises:
            OSError: the kernel has no netem.
        """
        _run("tc", "qdisc", "replace", "dev", host.cable, "root", "netem", "delay", f"{milliseconds:g}ms")

    def close(self) -> None:
        """Remove everything that was made. Idempotent."""
        hosts, self.hosts = self.hosts, []
        for host in hosts:
            _run("ip", "link", "delete", host.cable, check=False)
            _run("ip", "netns", "delete", host.namespace, check=False)
        _run("ip", "link", "delete", self._switch, check=False)

    def _plug_in(self, host: Host, prefix_length: int) -> None:
        _ip("netns", "add", host.namespace)
        _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        inside = ("-netns", host.namespace)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "address", "add", f"{host.address}/{prefix_length}", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip("link", "set", host.cable, "master", self._switch, "up")


def _free_subnet() -> ipaddress.IPv4Network:
    """256 addresses of 10.64.0.0/10 that no interface of this machine is in."""
    taken = [ipaddress.ip_interface(word).network for word in _ip("-o", "-4", "address").split() if "/" in word]
    while True:
        subnet = ipaddress.ip_network(f"10.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}.0/24")
        assert isinstance(subnet, ipaddress.IPv4Network)
        if not any(subnet.overlaps(other) for other in taken):
            return subnet


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if check and done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or 'failed'}")
    return done.stdout
