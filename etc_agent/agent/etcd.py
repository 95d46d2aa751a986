"""Creates the connection to etcd from the settings, and tells the fence what it needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass

from etc_agent.agent.settings import EtcdSettings
from etc_agent.rendezvous.etcd.client import EtcdClient, Tls
from etc_agent.rendezvous.membership import Membership
from etc_agent.rendezvous.mirror import Mirror


def connect(etcd: EtcdSettings, timeout_s: float) -> EtcdClient:
    """A client for `etcd`. `timeout_s`: for each request, retries included."""
    files = (etcd.ca_file, etcd.cert_file, etcd.key_file)
    tls = Tls(*files) if any(files) else None
    return EtcdClient(etcd.endpoints, tls=tls, user=etcd.user, password=etcd.password, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class Followed:
    """This agent's connection to etcd as `agent.safety.fence` sees it. `ttl_s`: of the node's lease."""

    membership: Membership
    mirror: Mirror
    ttl_s: float

    @property
    def lease_until(self) -> float:
        return self.membership.lease.deadline_monotonic

    @property
    def heard_at(self) -> float:
        return max(self.lease_until - self.ttl_s, self.mirror.last_heard_monotonic)
