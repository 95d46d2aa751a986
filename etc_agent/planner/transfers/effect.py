"""A plan written out on a cluster: bytes per worker, per node and per port, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etc_agent.parallel.topology import Placement, Slot, Topology
from etc_agent.planner.placing.loads import ports_of
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.layout import Layout, Manifest


def by_worker(
    previous: Layout, where: Placement, current: Layout, placement: Placement
) -> tuple[list[Slot], list[Manifest], list[Manifest]]:
    """(slot, previous manifest, current manifest) of every worker, those of the previous generation first."""
    slots = list(dict.fromkeys([*where, *placement]))
    held, wanted = dict(zip(where, previous, strict=True)), dict(zip(placement, current, strict=True))
    return slots, [held.get(slot, ()) for slot in slots], [wanted.get(slot, ()) for slot in slots]


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """`between`: bytes from node to node, (nodes, nodes), in the order of the topology. `ports`: name -> (sent,
    received) between nodes. `seconds`: of the busiest port."""

    between: NDArray[np.int64]
    ports: dict[str, tuple[int, int]]
    seconds: float


def traffic_of(plan: MigrationPlan, slots: Sequence[Slot], topology: Topology) -> Traffic:
    """The bytes that a plan sends over each link. `slots`: worker -> slot."""
    names = [node.name for node in topology.nodes]
    nodes = [names.index(slot.node) for slot in slots]
    ports = ports_of(topology, slots)
    between = np.zeros((len(names), len(names)), dtype=np.int64)
    sent, received = np.zeros(len(ports.names), np.int64), np.zeros(len(ports.names), np.int64)
    for transfers in plan.rounds:
        for transfer in transfers:
            source, target = nodes[transfer.source], nodes[transfer.target]
            between[source, target] += transfer.num_bytes
            if source != target:
                sent[ports.of[slots[transfer.source]]] += transfer.num_bytes
                received[ports.of[slots[transfer.target]]] += transfer.num_bytes
    seconds = float((np.maximum(sent, received) / ports.bytes_per_s).max()) if len(sent) else 0.0
    loads = {name: (int(out), int(into)) for name, out, into in zip(ports.names, sent, received, strict=True)}
    return Traffic(between, loads, seconds)


def kept_bytes(plan: MigrationPlan) -> list[int]:
    """Worker -> the bytes of its new state that it holds already."""
    kept = [0] * plan.num_workers
    for refer in plan.refers:
        kept[refer.worker] += refer.box.num_elements * refer.tensor.itemsize
    return kept


def received_bytes(plan: MigrationPlan) -> list[int]:
    """Worker -> the bytes that it receives."""
    received = [0] * plan.num_workers
    for transfers in plan.rounds:
        for transfer in transfers:
            received[transfer.target] += transfer.num_bytes
    return received


def num_transfers(plan: MigrationPlan) -> int:
    """How many transfers a plan has in all."""
    return sum(map(len, plan.rounds))


def buffer_bytes(plan: MigrationPlan) -> int:
    """The most that a worker sends and receives in one round, for which it may need buffers beside its state."""
    most = 0
    for transfers in plan.rounds:
        busy = [0] * plan.num_workers
        for transfer in transfers:
            busy[transfer.source] += transfer.num_bytes
            busy[transfer.target] += transfer.num_bytes
        most = max(most, *busy)
    return most
