"""Jobs that the tests of decisions begin with."""

from __future__ import annotations

from etc_agent.parallel.config import ParallelConfig
from etc_agent.reconfig.known.view import Policy
from etc_agent.simulator.cluster.at_rest import Cluster

ONE_NODE = Policy(1, 1, num_slots=4, initial=ParallelConfig(pp=2))
ELASTIC = Policy(1, 3, num_slots=2)


def started(policy: Policy, *nodes: str, **options: object) -> Cluster:
    cluster = Cluster(policy, **options)  # type: ignore[arg-type]
    for node in nodes:
        cluster.join(node)
    cluster.run()
    return cluster


def one_node() -> Cluster:
    cluster = Cluster(ONE_NODE)
    cluster.join("a", num_slots=4)
    cluster.run()
    return cluster
