"""Which other nodes a node must consider before it stops or keeps its workers while etcd is unreachable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from etc_agent.reconfig.known.observing import JobRecords


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the records show, or showed last before etcd was lost. Nodes are given with the ``host:port`` at which their
    agents answer.

    `others`: all other nodes of the job. `companions`: those with workers in the same generation. `gone`: nodes that
    are no longer in etcd and may still have workers. `has_workers`: this node has workers, or is about to start some.
    """

    others: Mapping[str, str] = field(default_factory=dict)
    companions: frozenset[str] = frozenset()
    gone: Mapping[str, str] = field(default_factory=dict)
    has_workers: bool = False

    @classmethod
    def of(cls, node: str, records: JobRecords, *, has_workers: bool) -> Self:
        """The surroundings of `node`."""
        others = {each.name: f"{each.address}:{each.contact_port}" for each in records.nodes if each.name != node}
        present = (records.current.committed, records.current.proposed)
        generations = [records.generations[id_] for id_ in present if id_ in records.generations]
        companions = frozenset(generations[0].nodes) & others.keys() if generations else frozenset()
        gone = {
            ack.node: ack.contact
            for generation in generations
            for member in generation.nodes
            if member != node and member not in others
            if (ack := records.acks.get((generation.id, member))) is not None and ack.contact
        }
        return cls(others, companions, gone, has_workers)
