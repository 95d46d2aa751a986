"""The control plane of one agent, without workers: what `bench_control.py` and the tests of `rendezvous` run by the
dozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from etc_agent.rendezvous.election import Election
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.membership import Membership
from etc_agent.rendezvous.mirror import Mirror


@dataclass
class StandInAgent:
    """An agent's connection to etcd, its copy of the job's keys, its own key under a lease, and its candidacy."""

    client: EtcdClient
    mirror: Mirror
    membership: Membership
    election: Election

    @classmethod
    def start(
        cls, endpoint: str, keys: JobKeys, name: str, value: str, *,
        ttl_s: int, timeout_s: float = 5.0, on_change: Callable[[Mirror], None] = lambda mirror: None,
    ) -> StandInAgent:
        """Join as `name`, with `value` in its key. `on_change` is called with the mirror after every change."""
        client = EtcdClient([endpoint], timeout_s=timeout_s)
        mirror = Mirror(client, keys.root, lambda: on_change(mirror))
        membership = Membership(client, keys.node(name), value, ttl_s=ttl_s)
        election = Election(client, mirror, keys.leader, name, lambda: membership.lease)
        return cls(client, mirror, membership, election)

    def stop(self) -> None:
        self.election.close()
        self.membership.close()
        self.mirror.close()
        self.client.close()
