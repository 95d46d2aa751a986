"""The slots available to ranks, by node, with tp groups and pins; and assignments that obey these constraints."""

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
from etc_agent.planner.placing.assignment import assign_rows

LOCAL = 1 / 64
"""Weight of a byte moved inside a node, relative to one moved between nodes."""
_MAX_SUBSETS = 64
"""Up to this many subsets of nodes are all tried when packing; beyond that, nodes are dropped one by one."""
_MANY = 1024
"""Up to this many ranks, a rank that can stay in place is preferred over other ranks that need the same."""


@dataclass(frozen=True, slots=True, eq=False)
class Keep:
    """What need not be moved, in one unit of bytes, by class of rank (ranks of a class need the same).

    `class_of_rank`: (ranks,). `on_node`: (classes, nodes), held by the node. `on_slot`: (classes, slots), by the
    worker on the slot itself. `home`: (ranks,), the slot where the rank of this number was, or -1.
    """

    class_of_rank: NDArray[np.intp]
    on_node: NDArray[np.float64]
    on_slot: NDArray[np.float64]
    home: NDArray[np.intp]


class Spots:
    """The available slots, and the constraints on any placement.

    Raises:
        PlanError: too few slots, or a pin that cannot be met.
    """

    def __init__(
        self,
        num_ranks: int,
        slots: Sequence[Slot],
        topology: Topology,
        group_size: int,
        pinned: Mapping[int, Slot],
        pinned_nodes: Collection[str] = (),
    ) -> None:
        order = {node.name: index for index, node in enumerate(topology.nodes)}
        unknown = sorted({slot.node for slot in slots} - order.keys())
        if unknown:
            raise PlanError(f"slots on {', '.join(unknown)}, but the topology has {', '.join(order) or 'no nodes'}")
        if num_ranks % group_size:
            raise PlanError(f"{num_ranks} ranks are not whole tp groups of {group_size}")
        self.num_ranks = num_ranks
        self.group_size = group_size
        self.num_groups = num_ranks // group_size
        self.slots = sorted(set(slots), key=lambda slot: (order[slot.node], slot.index))
        self.node_names = list(dict.fromkeys(slot.node for slot in self.slots))
        by_name = {name: index for index, name in enumerate(self.node_names)}
        self.node_of_slot = np.array([by_name[slot.node] for slot in self.slots], dtype=np.intp)
        self.capacity = np.bincount(self.node_of_slot, minlength=len(self.node_names))
        self.first_slot = np.concatenate([[0], np.cumsum(self.capacity)])
        self.largest_first = np.argsort(-self.capacity, kind="stable")
        if len(self.slots) < num_ranks:
            have = ", ".join(f"{name}: {count}" for name, count in zip(self.node_names, self.capacity, strict=True))
            raise PlanError(f"{num_ranks} ranks need as many slots; {len(self.slots)} are available ({have or 'none'})")
        self.index_of = {slot: index for index, slot in enumerate(self.slots)}
        self.pinned: dict[int, int] = {}
        for rank, slot in sorted(pinned.items()):
            if not 0 <= rank < num_ranks or slot not in self.index_of:
                raise PlanError(f"rank {rank} cannot be pinned to {slot}: no such rank or no such available slot")
            self.pinned[rank] = self.index_of[slot]
        if len(set(self.pinned.values())) != len(self.pinned):
            raise PlanError("two ranks are pinned to one slot")
        absent = sorted(set(pinned_nodes) - by_name.keys())
        if absent:
            raise PlanError(f"{', '.join(absent)} cannot be kept: no available slot is there")
        self.must_use = {by_name[name] for name in pinned_nodes} | {
            int(self.node_of_slot[slot]) for slot in self.pinned.values()
        }

    def placement(self, chosen: Sequence[int] | NDArray[np.intp]) -> Placement:
        return tuple(self.slots[slot] for slot in chosen)

    def in_order(self) -> NDArray[np.intp]:
        """Nothing is kept: ranks to slots in node order, as far as groups and pins allow."""
        if not self.pinned:
            return self._fill()
        on_node = -np.arange(len(self.node_names), dtype=np.float64) * np.ones((self.num_ranks, 1))
        distance = np.abs(np.arange(self.num_ranks)[:, None] - np.arange(len(self.slots))[None, :])
        nowhere = np.full(self.num_ranks, -1, dtype=np.intp)
        keep = Keep(np.arange(self.num_ranks), on_node, -distance / (len(self.slots) + 1.0) ** 2, nowhere)
        return self.assign(keep, range(len(self.node_names)))

    def _fill(self) -> NDArray[np.intp]:
        chosen = np.full(self.num_ranks, -1, dtype=np.intp)
        group = 0
        left: list[int] = []
        for node, count in enumerate(self.capacity):
            fit = min(int(count) // self.group_size, self.num_groups - group)
            start, taken = self.first_slot[node], fit * self.group_size
            chosen[group * self.group_size :][:taken] = np.arange(start, start + taken)
            left.extend(range(start + taken, start + count))
            group += fit
        torn = np.flatnonzero(chosen < 0)
        chosen[torn] = left[: len(torn)]
        return chosen

    # ---- fewest nodes ---------------------------------------------------------------------------------------------

    def fewest_nodes(self, keep: Keep) -> tuple[int, ...]:
        """The fewest nodes that suffice, and among those the ones that keep most."""
        every = tuple(range(len(self.node_names)))
        alive = np.ones(len(every), dtype=bool)
        fewest = next((count for count in range(1, len(every)) if self._some_suffice(count, alive)), len(every))
        if comb(len(every), fewest) <= _MAX_SUBSETS:
            options = [nodes for nodes in combinations(every, fewest) if self._suffices(nodes)]
            return max(options, key=lambda nodes: self.kept(keep, self.assign(keep, nodes)), default=every)
        while int(alive.sum()) > fewest:
            self._drop_nodes(keep, fewest, alive)
        return tuple(map(int, np.flatnonzero(alive)))

    def _drop_nodes(self, keep: Keep, fewest: int, alive: NDArray[np.bool_]) -> None:
        """Assign to all nodes that are `alive`, then drop nodes without ranks, and half of those beyond the fewest."""
        kept = self._kept_by_node(keep, [int(node) for node in np.flatnonzero(alive)])
        too_many = int(alive.sum()) - fewest
        stay = fewest + min(too_many // 2, max(0, int((kept > 0).sum()) - fewest))
        for node in np.lexsort((-np.arange(len(kept)), kept)):
            if alive[node] and int(node) not in self.must_use:
                alive[node] = False
                alive[node] = not self._some_suffice(fewest, alive)
            if int(alive.sum()) <= stay:
                break

    def _kept_by_node(self, keep: Keep, nodes: list[int]) -> NDArray[np.float64]:
        """The value of each node, (nodes,): what it keeps, and a little for each rank, if `nodes` share the ranks."""
        if self.group_size == 1:
            node_of_rank = self.node_of_slot[self._ranks_to_all(keep, nodes)]
        else:
            node_of_rank = np.repeat(self._groups_to_nodes(keep, nodes), self.group_size)
        placed = np.flatnonzero(node_of_rank >= 0)
        worth = keep.on_node[keep.class_of_rank[placed], node_of_rank[placed]] + LOCAL
        return np.bincount(node_of_rank[placed], worth, minlength=len(self.node_names)).astype(np.float64)

    def _suffices(self, nodes: Sequence[int]) -> bool:
        """Whether all ranks fit on `nodes` without splitting a tp group that the whole cluster could keep whole."""
        whole = self.capacity // self.group_size
        chosen = list(nodes)
        return (
            int(self.capacity[chosen].sum()) >= self.num_ranks
            and int(whole[chosen].sum()) >= min(self.num_groups, int(whole.sum()))
            and self.must_use <= set(chosen)
        )

    def _some_suffice(self, count: int, alive: NDArray[np.bool_]) -> bool:
        """Whether some `count` of the `alive` nodes suffice: if any do, the largest do."""
        must = sorted(self.must_use)
        others = [int(node) for node in self.largest_first[alive[self.largest_first]] if int(node) not in must]
        return len(must) <= count and self._suffices([*must, *others[: count - len(must)]])

    # ---- groups to nodes, ranks to slots --------------------------------------------------------------------------

    def kept(self, keep: Keep, chosen: NDArray[np.intp]) -> float:
        """What an assignment keeps: between nodes, and a little for what stays on its slot."""
        classes = keep.class_of_rank
        between = keep.on_node[classes, self.node_of_slot[chosen]].sum()
        return float(between + LOCAL * keep.on_slot[classes, chosen].sum())

    def assign(self, keep: Keep, nodes: Sequence[int]) -> NDArray[np.intp]:
        """Rank -> slot on `nodes`, so that most is kept: groups to nodes first, then ranks inside each node.

        Where groups are single ranks, both at once.
        """
        if self.group_size == 1:
            return self._ranks_to_all(keep, list(nodes))
        node_of_group = self._groups_to_nodes(keep, list(nodes))
        self._make_room_for_pins(node_of_group)
        chosen = np.full(self.num_ranks, -1, dtype=np.intp)
        size = self.group_size
        order = np.argsort(node_of_group, kind="stable")
        for node in nodes:
            low, high = np.searchsorted(node_of_group, [node, node + 1], sorter=order)
            if low == high:
                continue
            ranks = (order[low:high, None] * size + np.arange(size)[None, :]).reshape(-1)
            self.ranks_to_slots(np.sort(ranks), np.arange(*self.first_slot[node : node + 2]), keep, chosen)
        torn = np.flatnonzero(chosen < 0)
        if len(torn):
            left = np.setdiff1d(np.flatnonzero(np.isin(self.node_of_slot, list(nodes))), chosen[chosen >= 0])
            self.ranks_to_slots(torn, left, keep, chosen)
        return chosen

    def _ranks_to_all(self, keep: Keep, nodes: list[int]) -> NDArray[np.intp]:
        """Ranks to slots of all of `nodes`: what the node keeps first, what the slot keeps second."""
        where = np.flatnonzero(np.isin(self.node_of_slot, nodes))
        chosen = np.full(self.num_ranks, -1, dtype=np.intp)
        if self.num_ranks <= _MANY:
            value = keep.on_node[:, self.node_of_slot[where]] + LOCAL * keep.on_slot[:, where]
            free = Keep(keep.class_of_rank, keep.on_node, np.zeros_like(keep.on_slot), keep.home)
            free.on_slot[:, where] = value
            self.ranks_to_slots(np.arange(self.num_ranks), where, free, chosen, stay=LOCAL)
            return chosen
        for rank, slot in self.pinned.items():
            chosen[rank] = slot
        ranks, where = np.flatnonzero(chosen < 0), np.setdiff1d(where, chosen)
        value = keep.on_node[:, self.node_of_slot[where]] + LOCAL * keep.on_slot[:, where]
        columns, kind_of_slot = np.unique(value, axis=1, return_inverse=True)
        chosen[ranks] = where[assign_rows(columns, keep.class_of_rank[ranks], kind_of_slot)]
        return chosen

    def _groups_to_nodes(self, keep: Keep, nodes: list[int]) -> NDArray[np.intp]:
        """Group -> node; -1 for groups that fit nowhere whole. Groups with pinned ranks come first."""
        size = self.group_size
        result = np.full(self.num_groups, -1, dtype=np.intp)
        room = self.capacity[nodes] // size
        homes = self._homes_of_pinned_groups()
        for group, (node, *others) in homes.items():
            at = nodes.index(node)
            if not others and room[at] > 0:
                result[group] = node
                room[at] -= 1
        groups = np.array([group for group in range(self.num_groups) if group not in homes], dtype=np.intp)
        places = np.repeat(np.arange(len(nodes)), room)
        if not len(places) or not len(groups):
            return result
        best_slot = np.maximum.reduceat(keep.on_slot, self.first_slot[:-1], axis=1)
        by_class = (keep.on_node + LOCAL * best_slot)[:, nodes]
        members = keep.class_of_rank.reshape(self.num_groups, size)[groups]
        if self.num_ranks <= _MANY:
            at_home = keep.home.reshape(self.num_groups, size)[groups]
            node_of_home = np.where(at_home >= 0, self.node_of_slot[at_home], -1)
            stays = (node_of_home[:, :, None] == np.array(nodes)[None, None, :]).sum(axis=1)
            value = by_class[members].sum(axis=1) + stays * (0.25 * LOCAL / (self.num_ranks + 1))
            chosen = assign_rows(value, np.arange(len(groups)), places)
        else:
            kinds, class_of_group = np.unique(members, axis=0, return_inverse=True)
            value, kind_of_node = np.unique(by_class[kinds].sum(axis=1), axis=1, return_inverse=True)
            chosen = assign_rows(value, class_of_group, kind_of_node[places])
        fits = chosen >= 0
        result[groups[fits]] = np.array(nodes)[places[chosen[fits]]]
        return result

    def _homes_of_pinned_groups(self) -> dict[int, list[int]]:
        """Group -> the nodes that its ranks are pinned to."""
        homes: dict[int, dict[int, None]] = {}
        for rank, slot in self.pinned.items():
            homes.setdefault(rank // self.group_size, {})[int(self.node_of_slot[slot])] = None
        return {group: list(found) for group, found in homes.items()}

    def _make_room_for_pins(self, node_of_group: NDArray[np.intp]) -> None:
        """Tear groups, the last first, from nodes whose slots are pinned to ranks of groups that live elsewhere."""
        pinned_groups = {rank // self.group_size for rank in self.pinned}
        for node in {int(self.node_of_slot[slot]) for slot in self.pinned.values()}:
            here = [int(group) for group in np.flatnonzero(node_of_group == node)]
            while here:
                guests = sum(
                    self.node_of_slot[slot] == node and rank // self.group_size not in here
                    for rank, slot in self.pinned.items()
                )
                if len(here) * self.group_size + guests <= self.capacity[node]:
                    break
                torn = max(here, key=lambda group: (group not in pinned_groups, group))
                here.remove(torn)
                node_of_group[torn] = -1

    def ranks_to_slots(
        self,
        ranks: NDArray[np.intp],
        spots: NDArray[np.intp],
        keep: Keep,
        chosen: NDArray[np.intp],
        *,
        stay: float = 1.0,
    ) -> None:
        """Ranks to the slots of `spots` that keep most; pinned ones to their own, which no other gets.

        `stay`: worth of the least unit of bytes, below which staying in place decides.
        """
        if self.pinned:
            reserved = list(self.pinned.values())
            for rank in ranks:
                if int(rank) in self.pinned:
                    chosen[rank] = self.pinned[int(rank)]
            ranks = np.array([rank for rank in ranks if int(rank) not in self.pinned], dtype=np.intp)
            spots = np.array([spot for spot in spots if int(spot) not in reserved], dtype=np.intp)
        if not len(ranks):
            return
        value = keep.on_slot[np.ix_(keep.class_of_rank[ranks], spots)]
        value = value + (keep.home[ranks][:, None] == spots[None, :]) * (0.5 * stay / (self.num_ranks + 1))
        rows, columns = linear_sum_assignment(value, maximize=True)
        chosen[ranks[rows]] = spots[columns]
