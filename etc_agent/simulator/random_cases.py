"""Random small migrations with their exhaustive answers: every placement, and for each the best sources.

Nothing here uses the planner's own arithmetic: shards become sets of single elements, and the best use of replicas is
the min-cut bound (a set of ports must send at least what only it holds), which is exact for divisible loads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from etc_agent.parallel.topology import Node, Placement, Slot, Topology
from etc_agent.planner.placing.placement import place
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Manifest, Shard

_WIDTH = 12
_FILLS = [(2, 2), (1, 2, 2), (3, 3), (2, 2, 2), (1, 1, 3), (4, 2)]
_DEGREES = [
    (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1),
    (1, 3, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 3), (1, 4, 1),
]
"""pp, tp, dp."""


def layered(num_layers: int, pp: int, tp: int, dp: int) -> Layout:
    """A layout of one-dimensional layers of 12 bytes, cut by pp and tp and copied by dp."""
    return tuple(
        tuple(
            Shard(LogicalTensor(f"l{k}", (_WIDTH,), "uint8", 1), Box((_WIDTH * t // tp,), (_WIDTH // tp,)))
            for k in range(num_layers * p // pp, num_layers * (p + 1) // pp)
        )
        for p in range(pp) for _ in range(dp) for t in range(tp)
    )


class RandomCase:
    """One problem. `group_size` is the tp of the current generation."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.num_layers = rng.choice([4, 5, 6, 8])
        fill, shared = rng.choice(_FILLS), rng.random() < 0.6
        self.topology = Topology(tuple(
            Node(name, count, num_nics=rng.choice([1, 2]) if shared else count, nic_bytes_per_s=1.0, shared_nics=shared)
            for name, count in zip("abc", fill, strict=False)
        ))
        self.slots = self.topology.slots
        fitting = [degrees for degrees in _DEGREES if prod(degrees) <= len(self.slots)]
        before, after = rng.choice(fitting), rng.choice(fitting)
        self.group_size = after[1]
        self.previous, self.current = layered(self.num_layers, *before), layered(self.num_layers, *after)
        self.where: Placement = tuple(rng.sample(self.slots, len(self.previous)))
        if before[2] > 1 and rng.random() < 0.3:  # a worker is lost, its replica remains
            self.previous = ((), *self.previous[1:])
        self.need = [self._elements(manifest) for manifest in self.current]
        on = dict(zip(self.where, map(self._elements, self.previous), strict=True))
        self.nothing = np.zeros(self.num_layers * _WIDTH, dtype=bool)
        self.on_node: dict[str, NDArray[np.bool_]] = {}
        self.behind: dict[str, NDArray[np.bool_]] = {}
        for slot, held in on.items():
            self.on_node[slot.node] = self.on_node.get(slot.node, self.nothing) | held
            self.behind[self.port(slot)] = self.behind.get(self.port(slot), self.nothing) | held
        self.cost = {
            (rank, slot): int((need & ~on.get(slot, self.nothing)).sum())
            for rank, need in enumerate(self.need) for slot in self.slots
        }

    def _elements(self, manifest: Manifest) -> NDArray[np.bool_]:
        held = np.zeros((self.num_layers, _WIDTH), dtype=bool)
        for shard in manifest:
            start = shard.box.offset[0]
            held[int(shard.tensor.name[1:]), start : start + shard.box.shape[0]] = True
        return held.ravel()

    def port(self, slot: Slot) -> str:
        return slot.node if self.topology.node(slot.node).shared_nics else str(slot)

    def speed(self, port: str) -> float:
        node = self.topology.node(port.partition("/")[0])
        return float(node.num_nics if node.shared_nics else 1)

    def placements(self) -> Iterator[Placement]:
        """Every placement that tears no tp group which fits somewhere."""
        yield from filter(self.is_legal, permutations(self.slots, len(self.current)))

    def is_legal(self, placement: Sequence[Slot]) -> bool:
        size = self.group_size
        groups = [placement[first : first + size] for first in range(0, len(placement), size)]
        whole = sum(len({slot.node for slot in group}) == 1 for group in groups)
        return whole >= min(len(groups), sum(node.num_slots // size for node in self.topology.nodes))

    def moved(self, placement: Sequence[Slot]) -> int:
        """All bytes that arrive at a worker."""
        return sum(self.cost[rank, slot] for rank, slot in enumerate(placement))

    def seconds(self, placement: Sequence[Slot], *, below: float = inf) -> float:
        """Time of the busiest port with the best sources; something not less than `below` once that is certain."""
        received: dict[str, float] = {}
        asked = np.zeros(len(self.nothing))
        for need, slot in zip(self.need, placement, strict=True):
            lacks = need & ~self.on_node.get(slot.node, self.nothing)
            received[self.port(slot)] = received.get(self.port(slot), 0.0) + float(lacks.sum())
            asked += lacks
        worst = max(amount / self.speed(port) for port, amount in received.items())
        names = list(self.behind)
        held = np.array([self.behind[name] for name in names])
        for count in range(1, len(names) + 1):
            for subset in combinations(range(len(names)), count):
                if worst >= below:
                    return worst
                others = [index for index in range(len(names)) if index not in subset]
                only_here = held[list(subset)].any(axis=0) & ~held[others].any(axis=0)
                speed = sum(self.speed(names[index]) for index in subset)
                worst = max(worst, float(asked[only_here].sum()) / speed)
        return worst

    def least_seconds(self) -> float:
        best = inf
        for placement in self.placements():
            best = min(best, self.seconds(placement, below=best))
        return best

    def least_bytes(self) -> int:
        return min(map(self.moved, self.placements()))


def compare_with_brute_force(num_cases: int, *, first_seed: int = 0) -> tuple[float, float]:
    """(the fraction of cases whose bottleneck is optimal, the worst bottleneck over the optimal one)."""
    optimal, worst = 0, 1.0
    for seed in range(first_seed, first_seed + num_cases):
        case = RandomCase(seed)
        best = case.least_seconds()
        result = place(
            case.current, case.slots, case.previous, case.where, case.topology, group_size=case.group_size
        )
        reached = case.seconds(result.placement)
        if reached <= best * (1 + 1e-9):
            optimal += 1
        else:
            worst = max(worst, reached / best if best else inf)
    return optimal / num_cases, worst
