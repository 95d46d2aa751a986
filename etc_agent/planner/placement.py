"""Where virtual ranks go: the migration sketch and the placement in one decision.

Constraints first: excluded nodes are sources only, pinned ranks stay, every tp group is inside a node where one fits.
With ``pack`` the fewest nodes are occupied. Then tp groups are assigned to nodes so that least is moved between nodes
(Hungarian method), and ranks to slots inside each node so that least is moved at all (again). What remains equal is
decided in favour of ranks that do not change place, and of the order of the nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from etc_agent.parallel.topology import Placement, Slot, Topology
from etc_agent.planner.errors import PlanError
from etc_agent.planner.holdings import Holdings, holdings_of
from etc_agent.state.layout import Layout

_LOCAL = 1 / 64
"""Weight of a byte moved inside a node against one moved between nodes."""
_MAX_SUBSETS = 64
"""Node subsets that are all tried when packing; beyond that, nodes are given up one by one."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A placement and what it costs.

    `placement`: virtual rank -> slot. `pairs`: the migration sketch, (current rank, previous worker) for every rank
    placed on a slot that had a worker. `moved_bytes`: received by all workers. `between_nodes_bytes`: the part of it
    that no worker of the receiver's node holds.
    """

    placement: Placement
    pairs: tuple[tuple[int, int], ...]
    moved_bytes: int
    between_nodes_bytes: int

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
    excluded: Collection[str] = (),
    pack: bool = False,
) -> Sketch:
    """Place the ranks of `current` on `slots`.

    `previous` and `previous_placement`: what worker j holds and where it is; None where nothing is to be kept, then
    ranks go to slots in node order. Workers that are lost have an empty manifest. `group_size`: tp, the number of
    consecutive ranks that should share a node. `pinned`: rank -> slot. `excluded`: nodes that take no ranks (they are
    drained) and still are sources.

    Raises:
        PlanError: too few slots, a pin that cannot be met, or layouts that contradict each other.
    """
    free = tuple(slot for slot in slots if slot.node not in excluded)
    problem = _Problem(len(current), free, topology, group_size, dict(pinned or {}))
    if previous is None or previous_placement is None:
        placement = problem.in_order()
        return Sketch(placement, (), sum(shard.num_bytes for manifest in current for shard in manifest), 0)
    if len(previous) != len(previous_placement):
        raise PlanError(f"{len(previous)} previous manifests, but {len(previous_placement)} slots they are on")
    return _sketch(holdings_of(previous, current), previous_placement, problem, pack=pack)


def _sketch(holdings: Holdings, previous_placement: Placement, problem: _Problem, *, pack: bool) -> Sketch:
    worker_on = {slot: worker for worker, slot in enumerate(previous_placement)}
    node_names = list(dict.fromkeys([*problem.node_names, *(slot.node for slot in previous_placement)]))
    node_index = {name: index for index, name in enumerate(node_names)}
    node_of_worker = np.array([node_index[slot.node] for slot in previous_placement], dtype=np.intp)
    common = holdings.common_bytes().toarray()
    union = holdings.union(node_of_worker, len(node_names))
    on_node = (holdings.current.multiply(holdings.atom_bytes) @ union.T).toarray()

    columns = [worker_on.get(slot, -1) for slot in problem.slots]
    own = np.where(np.array(columns) >= 0, common[:, columns], 0) if common.shape[1] else np.zeros((len(common), 1))
    stays = np.array(
        [[rank < len(previous_placement) and previous_placement[rank] == slot for slot in problem.slots]
         for rank in range(problem.num_ranks)]
    )
    unit = max(1, int(np.gcd.reduce(holdings.atom_bytes))) if len(holdings.atom_bytes) else 1
    gain = own / unit + stays * (0.5 / (problem.num_ranks + 1))
    node_gain = on_node[:, : len(problem.node_names)] / unit
    chosen = problem.assign(node_gain, gain, pack=pack)

    needed = holdings.needed_bytes()
    kept = sum(int(own[rank, slot]) for rank, slot in enumerate(chosen))
    inside = sum(int(on_node[rank, problem.node_of_slot[slot]]) for rank, slot in enumerate(chosen))
    return Sketch(
        tuple(problem.slots[slot] for slot in chosen),
        tuple((rank, columns[slot]) for rank, slot in enumerate(chosen) if columns[slot] >= 0),
        int(needed.sum()) - kept,
        int(needed.sum()) - inside,
    )


class _Problem:
    """The slots that may be used, by node, and what must hold wherever the ranks go."""

    def __init__(
        self, num_ranks: int, slots: Sequence[Slot], topology: Topology, group_size: int, pinned: dict[int, Slot]
    ) -> None:
        order = {node.name: index for index, node in enumerate(topology.nodes)}
        unknown = sorted({slot.node for slot in slots} - order.keys())
        if unknown:
            raise PlanError(f"slots on {', '.join(unknown)}, but the topology has {', '.join(order) or 'no nodes'}")
        if num_ranks % group_size:
            raise PlanError(f"{num_ranks} ranks are not whole tp groups of {group_size}")
        self.num_ranks = num_ranks
        self.group_size = group_size
        self.slots = sorted(set(slots), key=lambda slot: (order[slot.node], slot.index))
        self.node_names = list(dict.fromkeys(slot.node for slot in self.slots))
        by_name = {name: index for index, name in enumerate(self.node_names)}
        self.node_of_slot = np.array([by_name[slot.node] for slot in self.slots], dtype=np.intp)
        self.capacity = np.bincount(self.node_of_slot, minlength=len(self.node_names))
        if len(self.slots) < num_ranks:
            have = ", ".join(f"{name}: {count}" for name, count in zip(self.node_names, self.capacity, strict=True))
            raise PlanError(f"{num_ranks} ranks need as many slots; {len(self.slots)} are available ({have or 'none'})")
        index_of = {slot: index for index, slot in enumerate(self.slots)}
        self.pinned: dict[int, int] = {}
        for rank, slot in sorted(pinned.items()):
            if not 0 <= rank < num_ranks or slot not in index_of:
                raise PlanError(f"rank {rank} cannot be pinned to {slot}: no such rank or no such available slot")
            self.pinned[rank] = index_of[slot]
        if len(set(self.pinned.values())) != len(self.pinned):
            raise PlanError("two ranks are pinned to one slot")

    @property
    def num_groups(self) -> int:
        return self.num_ranks // self.group_size

    def in_order(self) -> Placement:
        """Nothing to keep: ranks to slots in the order of the nodes, as far as groups and pins allow."""
        nodes = -np.arange(len(self.node_names), dtype=np.float64) * np.ones((self.num_ranks, 1))
        spread = len(self.slots) + 1.0
        order = -np.abs(np.arange(self.num_ranks)[:, None] - np.arange(len(self.slots))[None, :]) / spread**2
        return tuple(self.slots[slot] for slot in self.assign(nodes, order, pack=False))

    def assign(self, node_gain: NDArray[np.float64], gain: NDArray[np.float64], *, pack: bool) -> list[int]:
        """Rank -> slot index. `node_gain`: (ranks, nodes), `gain`: (ranks, slots): what need not be moved."""
        nodes = self._pack(node_gain, gain) if pack else tuple(range(len(self.node_names)))
        return self._assign_on(nodes, node_gain, gain)[1]

    # ---- fewest nodes -------------------------------------------------------------------------------------------

    def _suffices(self, nodes: Sequence[int]) -> bool:
        """Whether all ranks fit on `nodes`, with no tp group torn that the whole cluster could keep whole."""
        whole = self.capacity // self.group_size
        wanted = min(self.num_groups, int(whole.sum()))
        chosen = list(nodes)
        return (
            int(self.capacity[chosen].sum()) >= self.num_ranks
            and int(whole[chosen].sum()) >= wanted
            and all(self.node_of_slot[slot] in nodes for slot in self.pinned.values())
        )

    def _pack(self, node_gain: NDArray[np.float64], gain: NDArray[np.float64]) -> tuple[int, ...]:
        """The fewest nodes that suffice, and among those the ones that keep most."""
        every = tuple(range(len(self.node_names)))
        fewest = next((k for k in range(1, len(every) + 1) if self._any_suffices(k)), len(every))
        if comb(len(every), fewest) <= _MAX_SUBSETS:
            options = [nodes for nodes in combinations(every, fewest) if self._suffices(nodes)]
            return max(options, key=lambda nodes: self._assign_on(nodes, node_gain, gain)[0], default=every)
        worth = node_gain.reshape(self.num_groups, self.group_size, -1).sum(axis=1)
        value = np.sort(worth, axis=0)[::-1]
        keep = {node: float(value[: max(1, self.capacity[node] // self.group_size), node].sum()) for node in every}
        nodes = every
        for node in sorted(every, key=lambda node: (keep[node], -node)):
            rest = tuple(other for other in nodes if other != node)
            if len(nodes) > fewest and self._suffices(rest):
                nodes = rest
        return nodes

    def _any_suffices(self, count: int) -> bool:
        must = {int(self.node_of_slot[slot]) for slot in self.pinned.values()}
        if len(must) > count:
            return False
        others = [node for node in np.argsort(-self.capacity, kind="stable") if node not in must]
        return self._suffices([*must, *(int(node) for node in others[: count - len(must)])])

    # ---- groups to nodes, ranks to slots ------------------------------------------------------------------------

    def _assign_on(
        self, nodes: Sequence[int], node_gain: NDArray[np.float64], gain: NDArray[np.float64]
    ) -> tuple[float, list[int]]:
        """(what is kept, rank -> slot index), using `nodes` only."""
        size = self.group_size
        node_of_group = self._groups_to_nodes(nodes, node_gain, gain)
        chosen = [-1] * self.num_ranks
        taken: set[int] = set()
        for node in nodes:
            ranks = [g * size + k for g, at in node_of_group.items() if at == node for k in range(size)]
            spots = [int(spot) for spot in np.flatnonzero(self.node_of_slot == node)]
            self._ranks_to_slots(ranks, spots, gain, chosen)
            taken.update(chosen[rank] for rank in ranks)
        torn = [rank for rank in range(self.num_ranks) if chosen[rank] < 0]
        if torn:
            spots = [s for node in nodes for s in map(int, np.flatnonzero(self.node_of_slot == node)) if s not in taken]
            self._ranks_to_slots(torn, spots, gain, chosen)
        ranks_index = np.arange(self.num_ranks)
        slots_index = np.array(chosen)
        kept = node_gain[ranks_index, self.node_of_slot[slots_index]].sum()
        return float(kept + _LOCAL * gain[ranks_index, slots_index].sum()), chosen

    def _groups_to_nodes(
        self, nodes: Sequence[int], node_gain: NDArray[np.float64], gain: NDArray[np.float64]
    ) -> dict[int, int]:
        """Group -> node, for the groups that stay whole."""
        size = self.group_size
        places = [node for node in nodes for _ in range(int(self.capacity[node]) // size)]
        if not places:
            return {}
        best_slot = np.stack([gain[:, self.node_of_slot == node].max(axis=1) for node in nodes], axis=1)
        value = (node_gain[:, list(nodes)] + _LOCAL * best_slot).reshape(self.num_groups, size, -1).sum(axis=1)
        forbidden = -(np.abs(value).sum() + 1.0)
        value = value.copy()
        column = {node: index for index, node in enumerate(nodes)}
        reserved: dict[int, set[int]] = {}
        for rank, slot in self.pinned.items():
            reserved.setdefault(rank // size, set()).add(int(self.node_of_slot[slot]))
        for group, homes in reserved.items():
            for node in nodes:
                if homes != {node}:
                    value[group, column[node]] = forbidden
        rows, columns = linear_sum_assignment(value[:, [column[node] for node in places]], maximize=True)
        homes_of = {
            int(group): places[at]
            for group, at in zip(rows, columns, strict=True)
            if value[group, column[places[at]]] > forbidden
        }
        self._make_room_for_pins(homes_of)
        return homes_of

    def _make_room_for_pins(self, node_of_group: dict[int, int]) -> None:
        """Tear groups, the last first, from nodes whose slots are pinned to ranks of groups that live elsewhere."""
        for node in set(node_of_group.values()):
            here = sorted(group for group, home in node_of_group.items() if home == node)
            while here:
                guests = sum(
                    self.node_of_slot[slot] == node and rank // self.group_size not in here
                    for rank, slot in self.pinned.items()
                )
                if len(here) * self.group_size + guests <= self.capacity[node]:
                    break
                pinned_groups = {rank // self.group_size for rank in self.pinned}
                torn = max(here, key=lambda group: (group not in pinned_groups, group))
                here.remove(torn)
                del node_of_group[torn]

    def _ranks_to_slots(
        self, ranks: Sequence[int], spots: Sequence[int], gain: NDArray[np.float64], chosen: list[int]
    ) -> None:
        """Ranks to the slots of `spots` that keep most; pinned ones to their own, which no other gets."""
        for rank in ranks:
            if rank in self.pinned:
                chosen[rank] = self.pinned[rank]
        reserved = set(self.pinned.values())
        open_ranks = [rank for rank in ranks if rank not in self.pinned]
        open_spots = [spot for spot in spots if spot not in reserved]
        if not open_ranks:
            return
        rows, columns = linear_sum_assignment(gain[np.ix_(open_ranks, open_spots)], maximize=True)
        for row, column in zip(rows, columns, strict=True):
            chosen[open_ranks[row]] = open_spots[column]
