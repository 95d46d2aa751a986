"""Where virtual ranks are placed: the migration sketch and the placement, decided together.

Constraints come first: excluded nodes are sources only, pinned ranks stay, and every tp group is on one node if one has
room for it. With ``pack`` the fewest nodes are used. Then are minimised, in this order: the time of the busiest port,
the bytes between nodes, all bytes, and the number of ranks that change slots.

The Hungarian method gives the placement of least bytes (tp groups to nodes, then ranks inside each node). It is used if
its bottleneck is provably the best; otherwise small problems are solved exactly (`placing.exact`), and larger
ones are improved by exchanging groups of the busiest node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from etc_agent.parallel.topology import Placement, Slot, Topology
from etc_agent.planner.errors import PlanError
from etc_agent.planner.placing.atoms import AtomTable, atoms_of
from etc_agent.planner.placing.bounds import receiving_bound
from etc_agent.planner.placing.exact import MAX_VARIABLES, SmallProblem
from etc_agent.planner.placing.loads import Fabric, Loads
from etc_agent.planner.placing.spots import Keep, Spots
from etc_agent.state.layout import Layout

Least = Literal["time", "bytes"]
"""What a placement minimises first: the time of the busiest port, or all bytes moved."""

_GOOD_ENOUGH = 1.0 + 1e-9
MAX_ASSIGNED = 400
"""Up to this many ranks the least bytes are found rank by rank."""
_BETWEEN_WEIGHTS = (1e-3, 1e-6)
"""Weight of a byte kept on its node, to choose among placements that move equally little; the first that is safe is
used."""
_MAX_TORN = 8
"""Where tp groups must be split, up to this many choices of which ones are all solved."""
_MAX_WORK = 1000
"""Ranks times exchanges tried for a problem that is too large to be solved exactly."""
_MAX_IMPROVED = 256
"""Up to this many ranks exchanges are tried."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A placement and what it costs.

    `placement`: virtual rank -> slot. `pairs`: the migration sketch, (current rank, previous worker) for every rank
    placed on a slot that had a worker. `moved_bytes`: received by all workers. `between_nodes_bytes`: the part of it
    that no worker of the receiver's node holds. `bottleneck_s`: time of the busiest port (`placing.loads`).
    `changed_ranks`: ranks on another slot than the previous rank of this number. `bound_s`: a time that no placement on
    these slots can beat.
    """

    placement: Placement
    pairs: tuple[tuple[int, int], ...]
    moved_bytes: int
    between_nodes_bytes: int
    bottleneck_s: float = 0.0
    changed_ranks: int = 0
    bound_s: float = 0.0

    @property
    def num_nodes(self) -> int:
        """Nodes occupied."""
        return len({slot.node for slot in self.placement})


def place(
    current: Layout,
    slots: Sequence[Slot],
    previous: Layout | None,
    previous_placement: Placement | None,
    topology: Topology,
    *,
    group_size: int = 1,
    pinned: Mapping[int, Slot] | None = None,
    pinned_nodes: Collection[str] = (),
    excluded: Collection[str] = (),
    pack: bool = False,
    least: Least = "time",
) -> Sketch:
    """Place the ranks of `current` on `slots`.

    `previous` and `previous_placement`: what worker j holds and where it is; None if nothing is to be kept, then ranks
    are assigned to slots in node order. Workers that are lost have an empty manifest. `group_size`: tp, the number of
    consecutive ranks that should share a node. `pinned`: rank -> slot. `pinned_nodes`: nodes that `pack` must keep.
    `excluded`: nodes that take no ranks (they are drained) but still are sources.
        PlanError: too few slots, a pin that cannot be met, or layouts that contradict each other.
    """
    if previous is None or previous_placement is None:
        free = [slot for slot in slots if slot.node not in excluded]
        spots = Spots(len(current), free, topology, group_size, pinned or {}, pinned_nodes)
        total = sum(shard.num_bytes for manifest in current for shard in manifest)
        return Sketch(spots.placement(spots.in_order()), (), total, 0)
    return place_atoms(
        atoms_of(previous, current), slots, previous_placement, topology,
        group_size=group_size, pinned=pinned, pinned_nodes=pinned_nodes, excluded=excluded, pack=pack, least=least,
    )


def place_atoms(
    table: AtomTable,
    slots: Sequence[Slot],
    previous_placement: Placement,
    topology: Topology,
    *,
    group_size: int = 1,
    pinned: Mapping[int, Slot] | None = None,
    pinned_nodes: Collection[str] = (),
    excluded: Collection[str] = (),
    pack: bool = False,
    least: Least = "time",
) -> Sketch:
    """The same from atoms, for jobs whose manifests would be too many to list. See `place`."""
    if table.num_workers != len(previous_placement):
        raise PlanError(f"{table.num_workers} previous manifests, but {len(previous_placement)} slots they are on")
    free = [slot for slot in slots if slot.node not in excluded]
    spots = Spots(table.num_ranks, free, topology, group_size, pinned or {}, pinned_nodes)
    search = _Search(table, spots, previous_placement, topology)
    nodes = spots.fewest_nodes(search.keep) if pack else tuple(range(len(spots.node_names)))
    return search.sketch(search.best(nodes, least))


class _Search:
    """One placement problem with everything computed once that no candidate changes."""

    def __init__(self, table: AtomTable, spots: Spots, previous: Placement, topology: Topology) -> None:
        self.table, self.spots = table, spots
        self.shared = all(node.shared_nics for node in topology.nodes)
        self.fabric = Fabric.build(table, previous, spots.slots, topology)
        self.port_of_slot = np.array([self.fabric.ports.of[slot] for slot in spots.slots], dtype=np.intp)
        self.unit = float(np.gcd.reduce(table.atom_bytes)) if len(table.atom_bytes) else 1.0
        self.worker_on = {slot: worker for worker, slot in enumerate(previous)}
        self.worker_of_slot = np.array([self.worker_on.get(slot, -1) for slot in spots.slots], dtype=np.intp)
        classes, rows = table.current_classes()
        weighted = rows.multiply(table.atom_bytes).tocsr()
        on_node = (weighted @ self.fabric.held.T).toarray()[:, : len(spots.node_names)]
        class_of_worker, held = table.previous_classes()
        common = np.hstack([(weighted @ held.T).toarray(), np.zeros((rows.shape[0], 1), np.int64)])
        class_of_slot = np.where(self.worker_of_slot >= 0, class_of_worker[self.worker_of_slot], held.shape[0])
        self.needed = np.asarray(rows @ table.atom_bytes, dtype=np.float64) / self.unit
        home = np.full(spots.num_ranks, -1, dtype=np.intp)
        for rank, slot in enumerate(previous[: spots.num_ranks]):
            home[rank] = spots.index_of.get(slot, -1)
        self.bounds: dict[tuple[int, ...], float] = {}
        self.received: set[tuple[int, ...]] = set()
        """Node sets whose bound counts what must be received, too."""
        self.keep = Keep(classes, on_node / self.unit, common[:, class_of_slot] / self.unit, home)

    def sketch(self, chosen: NDArray[np.intp]) -> Sketch:
        keep, spots, unit = self.keep, self.spots, self.unit
        classes = keep.class_of_rank
        total = self.needed[classes].sum()
        kept = keep.on_slot[classes, chosen].sum()
        inside = keep.on_node[classes, spots.node_of_slot[chosen]].sum()
        workers = self.worker_of_slot[chosen]
        seconds = self._seconds(chosen)
        return Sketch(
            spots.placement(chosen),
            tuple((rank, int(worker)) for rank, worker in enumerate(workers) if worker >= 0),
            round((total - kept) * unit),
            round((total - inside) * unit),
            seconds,
            int((keep.home != chosen).sum()),
            self._bound(range(len(spots.node_names)), seconds),
        )

    def best(self, nodes: Sequence[int], least: Least) -> NDArray[np.intp]:
        """The best assignment on `nodes`."""
        chosen = self.spots.assign(self.keep, nodes)
        if self.spots.num_ranks > MAX_ASSIGNED:
            return chosen
        seconds, _, everything, _ = self._order(chosen, "time")
        soonest = least == "time" and seconds <= self._bound(nodes, seconds) * _GOOD_ENOUGH
        if least == "time" and self.spots.num_ranks**2 > MAX_VARIABLES:  # too large to be solved exactly
            return chosen if soonest else self._exchange(chosen, nodes, least)
        cheapest = self._cheapest(nodes)
        if least == "bytes" and self.spots.group_size == 1:
            return self._exchange(cheapest, nodes, least)
        fewest = (self.needed[self.keep.class_of_rank] - self.keep.on_slot[self.keep.class_of_rank, cheapest]).sum()
        if everything <= fewest and (soonest or least == "bytes"):
            return chosen
        small = self._small(chosen, nodes)
        if small is not None:
            slots, problem = small
            answers = (replace(problem, whole_groups=whole).solve(least=least) for whole in self._whole(chosen))
            options = [chosen, *(slots[answer] for answer in answers if answer is not None)]
            return min(options, key=lambda option: self._order(option, least))
        return chosen if soonest else self._exchange(chosen, nodes, least)

    def _order(self, chosen: NDArray[np.intp], least: Least) -> tuple[float, ...]:
        """Smaller is better; times within a millionth are equal."""
        classes, spots = self.keep.class_of_rank, self.spots
        total = self.needed[classes].sum()
        everything = total - self.keep.on_slot[classes, chosen].sum()
        between = total - self.keep.on_node[classes, spots.node_of_slot[chosen]].sum()
        changed = float((self.keep.home != chosen).sum())
        seconds = float(f"{self._seconds(chosen):.6e}")
        if least == "bytes":
            return (everything, seconds, between, changed)
        return (seconds, between, everything, changed)

    def _seconds(self, chosen: NDArray[np.intp]) -> float:
        return self._loads(chosen).seconds

    def _loads(self, chosen: NDArray[np.intp]) -> Loads:
        # The fabric numbers the nodes with slots first, in the same order.
        return self.fabric.loads_at(self.spots.node_of_slot[chosen], self.port_of_slot[chosen])

    def _cheapest(self, nodes: Sequence[int]) -> NDArray[np.intp]:
        """The least bytes, were there no tp groups."""
        spots, keep = self.spots, self.keep
        where = np.flatnonzero(np.isin(spots.node_of_slot, list(nodes)))
        ranks = np.arange(spots.num_ranks)

        def solve(between: float) -> tuple[float, NDArray[np.intp]]:
            on_slot = keep.on_slot + between * keep.on_node[:, spots.node_of_slot]
            chosen = np.full(spots.num_ranks, -1, dtype=np.intp)
            spots.ranks_to_slots(ranks, where, replace(keep, on_slot=on_slot), chosen, stay=min(1.0, between or 1.0))
            return float(keep.on_slot[keep.class_of_rank, chosen].sum()), chosen

        most, chosen = solve(0.0)
        for between in _BETWEEN_WEIGHTS:
            kept, option = solve(between)
            if kept >= most:
                return option
        return chosen

    def _bound(self, nodes: Sequence[int], seconds: float) -> float:
        """A time that no placement on `nodes` can beat; the costlier part only where `seconds` beats the simple one.

        The least that must cross goes out through all ports that can send it, and what ranks lack comes in through the
        ports of the nodes they are on (`placing.bounds`).
        """
        key = tuple(nodes)
        if key not in self.bounds:
            self.bounds[key] = self._sending_bound(key)
        if self.bounds[key] * _GOOD_ENOUGH < seconds and key not in self.received:
            self.received.add(key)
            self.bounds[key] = max(self.bounds[key], self._receiving_bound(key))
        return self.bounds[key]

    def _sending_bound(self, nodes: Sequence[int]) -> float:
        classes, spots = self.keep.class_of_rank, self.spots
        crossing = self.needed[:, None] - self.keep.on_node[:, list(nodes)]
        if len(classes) > MAX_ASSIGNED:
            least = crossing.min(axis=1)[classes].sum()
        else:
            cost = np.repeat(crossing, spots.capacity[list(nodes)], axis=1)[classes]
            least = cost[linear_sum_assignment(cost)].sum()
        senders = np.unique(self.fabric.holder_ports.indices)
        if least <= 0.5 or not len(senders):  # nothing must cross, or nobody is left to send it
            return 0.0
        return float(least / self.fabric.ports.bytes_per_s[senders].sum() * self.unit)

    def _receiving_bound(self, nodes: Sequence[int]) -> float:
        """Rows are whole tp groups where all are whole and NICs are shared, else ranks."""
        spots, ports = self.spots, self.fabric.ports
        crossing = self.needed[:, None] - self.keep.on_node[:, list(nodes)]
        whole = spots.capacity // spots.group_size
        if self.shared and int(whole.sum()) >= spots.num_groups:
            members, kind = np.unique(
                self.keep.class_of_rank.reshape(spots.num_groups, spots.group_size), axis=0, return_inverse=True
            )
            crossing, room = crossing[members].sum(axis=1), whole[list(nodes)]
            bins, port = np.arange(len(nodes)), self.port_of_slot[spots.first_slot[list(nodes)]]
        else:
            kind = self.keep.class_of_rank
            slots = np.flatnonzero(np.isin(spots.node_of_slot, list(nodes)))
            port, first, room = np.unique(self.port_of_slot[slots], return_index=True, return_counts=True)
            bins = np.searchsorted(list(nodes), spots.node_of_slot[slots[first]])
        return receiving_bound(crossing[:, bins] / ports.bytes_per_s[port], np.bincount(kind), room) * self.unit

    # ---- small problems -------------------------------------------------------------------------------------------

    def _small(
        self, chosen: NDArray[np.intp], nodes: Sequence[int]
    ) -> tuple[NDArray[np.intp], SmallProblem] | None:
        """(the slots that matter, the problem on them), or None where that is too large."""
        spots, keep, fabric = self.spots, self.keep, self.fabric
        used = set(spots.node_of_slot[chosen])
        warm = {int(spots.node_of_slot[at]) for at in np.flatnonzero(self.worker_of_slot >= 0)}
        wanted = [node for node in nodes if node in used or node in warm]
        for node in nodes:
            size = spots.num_ranks * int(spots.capacity[[*wanted, node]].sum())
            if node not in wanted and size <= MAX_VARIABLES:
                wanted.append(node)
        if spots.num_ranks * int(spots.capacity[wanted].sum()) > MAX_VARIABLES:
            return None
        slots = np.flatnonzero(np.isin(spots.node_of_slot, wanted))
        classes = keep.class_of_rank
        allowed = np.ones((spots.num_ranks, len(slots)), dtype=bool)
        for rank, pin in spots.pinned.items():
            allowed[:, slots == pin] = False
            allowed[rank] = slots == pin
        ports = fabric.holder_ports
        keys = [ports.indices[ports.indptr[a] : ports.indptr[a + 1]].tobytes() for a in range(ports.shape[0])]
        sets = sorted(set(keys))
        number = {key: index for index, key in enumerate(sets)}
        set_of_atom = np.array([number[key] for key in keys], dtype=np.intp)
        sources = np.zeros((len(sets), len(fabric.ports.names)))
        for key, index in number.items():
            sources[index, np.frombuffer(key, dtype=ports.indices.dtype)] = 1
        by_set = np.zeros((len(keys), len(sets)))
        by_set[np.arange(len(keys)), set_of_atom] = self.table.atom_bytes / self.unit
        by_set[[not key for key in keys]] = 0.0  # what nobody holds can be sent by nobody, wherever ranks go
        need = self.table.current.toarray().astype(float)
        held = fabric.held.toarray().astype(float)[: len(spots.node_names)]
        missing = np.einsum("ra,na,aq->rnq", need, 1 - held, by_set, optimize=True)
        needed = self.needed[classes][:, None]
        moved = (keep.home[:, None] != slots[None, :]) + 1e-3 * np.arange(len(slots))[None, :]
        problem = SmallProblem(
            allowed, spots.node_of_slot[slots], self.port_of_slot[slots], fabric.ports.bytes_per_s,
            missing, sources, (),
            needed - keep.on_node[classes][:, spots.node_of_slot[slots]],
            needed - keep.on_slot[classes][:, slots],
            moved,
        )
        return slots, problem

    def _whole(self, chosen: NDArray[np.intp]) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Which groups share a node: all that do in `chosen`, or, where some cannot, as many others instead."""
        spots, size = self.spots, self.spots.group_size
        groups = [tuple(range(first, first + size)) for first in range(0, spots.num_ranks, size)] if size > 1 else []
        whole = tuple(group for group in groups if len(set(spots.node_of_slot[chosen[list(group)]])) == 1)
        if len(whole) < len(groups) and comb(len(groups), len(whole)) <= _MAX_TORN:
            yield from combinations(groups, len(whole))
        else:
            yield whole

    # ---- larger ones ----------------------------------------------------------------------------------------------

    def _exchange(self, chosen: NDArray[np.intp], nodes: Sequence[int], least: Least) -> NDArray[np.intp]:
        """Exchange groups between the busiest node and others while that helps; only where a try is quick."""
        if self.spots.num_ranks > _MAX_IMPROVED:
            return chosen
        best, order, tries = chosen, self._order(chosen, least), 0
        improved = True
        while improved:
            improved = False
            for option in self._neighbours(best, nodes):
                tries += 1
                if tries * self.spots.num_ranks > _MAX_WORK:
                    return best
                value = self._order(option, least)
                if value < order:
                    best, order, improved = option, value, True
                    break
        return best

    def _neighbours(self, chosen: NDArray[np.intp], nodes: Sequence[int]) -> Iterator[NDArray[np.intp]]:
        """Swaps of one group on the busiest port with one elsewhere, and moves of it to free slots of other nodes."""
        spots = self.spots
        loads, ports = self._loads(chosen), self.port_of_slot
        busiest = int(np.argmax(np.maximum(loads.sent, loads.received) / loads.ports.bytes_per_s))
        groups = chosen.reshape(spots.num_groups, spots.group_size)
        pinned = {rank // spots.group_size for rank in spots.pinned}
        free = np.setdiff1d(np.arange(len(spots.slots)), chosen)
        moving = [g for g in range(spots.num_groups) if g not in pinned and busiest in ports[groups[g]]]
        if not moving:
            moving = [g for g in range(spots.num_groups) if g not in pinned]
        for group in moving:
            home = spots.node_of_slot[groups[group, 0]]
            for node in nodes:
                room = free[spots.node_of_slot[free] == node]
                if node != home and len(room) >= spots.group_size:
                    option = groups.copy()
                    option[group] = room[: spots.group_size]
                    yield option.reshape(-1)
            for other in range(spots.num_groups):
                if other not in pinned and ports[groups[other, 0]] != ports[groups[group, 0]]:
                    option = groups.copy()
                    option[[group, other]] = option[[other, group]]
                    yield option.reshape(-1)
