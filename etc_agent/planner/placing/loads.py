"""The network load of a placement: bytes in and out of every port, and the time of the busiest one.

A *port* is what bytes between nodes pass through: all NICs of a node together if its slots share them, else one NIC.
Bytes between slots of one node pass no port. Ports are full duplex. If several workers hold what is needed, the sending
is spread over their ports so that the busiest one has as little as possible (water filling: for divisible loads and
concave capacities, the smallest sum of squares also has the smallest maximum).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from etc_agent.parallel.topology import Node, Slot, Topology
from etc_agent.planner.placing.atoms import AtomTable

_MAX_SPREAD = 200_000
"""Up to this many (needed part, possible port) entries sending is balanced exactly; beyond, it is spread evenly."""
_MAX_DENSE = 1 << 18
"""Up to this many entries sets of atoms are kept as dense matrices, which are faster than sparse ones for small
jobs."""
_SWEEPS = 60


@dataclass(frozen=True, slots=True, eq=False)
class Ports:
    """`names`: for people. `bytes_per_s`: (ports,). `of`: slot -> port."""

    names: tuple[str, ...]
    bytes_per_s: NDArray[np.float64]
    of: dict[Slot, int]


def ports_of(topology: Topology, slots: Sequence[Slot]) -> Ports:
    """The ports of all nodes that have one of `slots`; nodes unknown to the topology get the defaults of `Node`."""
    known = {node.name: node for node in topology.nodes}
    names: list[str] = []
    speed: list[float] = []
    index: dict[str, int] = {}
    of: dict[Slot, int] = {}
    for slot in slots:
        node = known.get(slot.node) or Node(slot.node, slot.index + 1)
        nic = slot.index % node.num_nics
        name = node.name if node.shared_nics else f"{node.name}:nic{nic}"
        if name not in index:
            index[name] = len(names)
            names.append(name)
            speed.append(node.nic_bytes_per_s * (node.num_nics if node.shared_nics else 1))
        of[slot] = index[name]
    return Ports(tuple(names), np.array(speed, dtype=np.float64), of)


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Bytes between nodes by port: `sent` and `received`, (ports,)."""

    ports: Ports
    sent: NDArray[np.float64]
    received: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """The time of the busiest port if it is never idle."""
        if not len(self.sent):
            return 0.0
        return float((np.maximum(self.sent, self.received) / self.ports.bytes_per_s).max())


@dataclass(frozen=True, slots=True, eq=False)
class Fabric:
    """Where the previous workers are: everything about the sending side that no placement changes.

    `node_of_worker`, `port_of_worker`: (workers,). `held`: what each node holds, sparse 0/1 (nodes, atoms).
    `holder_ports`: the ports that an atom can leave through, sparse 0/1 (atoms, ports); `num_ports_of_atom`: (atoms,).
    `dense`: where small, what ranks need (ranks, atoms) and what nodes lack (nodes, atoms), as 0/1.
    """

    table: AtomTable
    ports: Ports
    node_names: tuple[str, ...]
    node_of_worker: NDArray[np.intp]
    held: csr_matrix
    holder_ports: csr_matrix
    num_ports_of_atom: NDArray[np.intp]
    dense: tuple[NDArray[np.float64], NDArray[np.float64]] | None

    @classmethod
    def build(
        cls, table: AtomTable, previous_slots: Sequence[Slot], slots: Sequence[Slot], topology: Topology
    ) -> Fabric:
        everywhere = dict.fromkeys([*slots, *previous_slots])
        ports = ports_of(topology, list(everywhere))
        names = tuple(dict.fromkeys(slot.node for slot in everywhere))
        index = {name: number for number, name in enumerate(names)}
        nodes = np.array([index[slot.node] for slot in previous_slots], dtype=np.intp)
        through = np.array([ports.of[slot] for slot in previous_slots], dtype=np.intp)
        held = table.union(nodes, len(names))
        holder_ports = table.union(through, len(ports.names)).T.tocsr()
        dense = None
        if max(table.num_ranks, len(names)) * len(table.atom_bytes) <= _MAX_DENSE:
            dense = (table.current.toarray().astype(np.float64), 1.0 - held.toarray())
        return cls(table, ports, names, nodes, held, holder_ports, np.diff(holder_ports.indptr), dense)

    def loads(self, placement: Sequence[Slot]) -> Loads:
        """Bytes by port if current rank i is placed on ``placement[i]`` and the best sources are used."""
        index = {name: number for number, name in enumerate(self.node_names)}
        nodes = np.array([index[slot.node] for slot in placement], dtype=np.intp)
        return self.loads_at(nodes, np.array([self.ports.of[slot] for slot in placement], dtype=np.intp))

    def loads_at(self, nodes: NDArray[np.intp], ports: NDArray[np.intp]) -> Loads:
        """The same from the numbers of each rank's node and port, (ranks,)."""
        table = self.table
        # What a node already holds crosses no port.
        if self.dense is not None:
            lacking = self.dense[0] * self.dense[1][nodes]
            by_rank, counts = lacking @ table.atom_bytes, lacking.sum(axis=0)
        else:
            missing = table.current - table.current.multiply(self.held[nodes])
            by_rank = np.asarray(missing @ table.atom_bytes, dtype=np.float64)
            counts = np.asarray(missing.sum(axis=0), dtype=np.float64).ravel()
        received = np.bincount(ports, by_rank, minlength=len(self.ports.names)).astype(np.float64)
        return Loads(self.ports, self.spread(counts * table.atom_bytes), received)

    def spread(self, wanted: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes sent by port when `wanted` bytes of each atom, (atoms,), are spread over the ports that hold it."""
        ports, speed = self.holder_ports, self.ports.bytes_per_s
        lengths = self.num_ports_of_atom
        asked = np.flatnonzero(wanted)
        forced = asked[lengths[asked] == 1]
        sent = np.bincount(ports.indices[ports.indptr[forced]], wanted[forced], minlength=len(speed)).astype(float)
        free = asked[lengths[asked] > 1]
        if not len(free):
            return sent
        if lengths[free].sum() > _MAX_SPREAD:
            share = ports[free].multiply((wanted[free] / lengths[free])[:, None]).tocsr()
            return sent + np.asarray(share.sum(axis=0)).ravel()
        demands: dict[bytes, float] = {}
        for atom in free:
            key = ports.indices[ports.indptr[atom] : ports.indptr[atom + 1]].tobytes()
            demands[key] = demands.get(key, 0.0) + float(wanted[atom])
        choices = [(np.frombuffer(key, dtype=ports.indices.dtype), size) for key, size in sorted(demands.items())]
        return _fill(choices, sent, speed)


def _fill(
    choices: Sequence[tuple[NDArray[np.int32], float]], fixed: NDArray[np.float64], speed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Spread each (ports, bytes) over its ports: level each against all others in turn until nothing changes."""
    total = fixed.copy()
    flows = [np.zeros(len(where)) for where, _ in choices]
    for sweep in range(_SWEEPS):
        change = 0.0
        for number, (where, size) in enumerate(choices):
            rest = total[where] - flows[number]
            level = _level(rest, speed[where], size)
            flow = np.maximum(0.0, level * speed[where] - rest)
            change = max(change, float(np.abs(flow - flows[number]).max()))
            total[where] = rest + flow
            flows[number] = flow
        if len(choices) == 1 or (sweep and change <= 1e-6 * max(size for _, size in choices)):
            break
    return total


def _level(load: NDArray[np.float64], speed: NDArray[np.float64], size: float) -> float:
    """The time t at which ports with `load` have taken `size` more: sum of max(0, t * speed - load) = size."""
    order = np.argsort(load / speed, kind="stable")
    loads, speeds = np.cumsum(load[order]), np.cumsum(speed[order])
    times = (loads + size) / speeds
    nexts = np.append((load / speed)[order][1:], np.inf)
    return float(times[int(np.argmax(times <= nexts))])
