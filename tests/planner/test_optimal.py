"""Placements against brute force: every placement, and for each the best sources (by the min-cut theorem)."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import numpy as np

from etc_agent.parallel.topology import Node, Slot, Topology
from etc_agent.planner.placement import place
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Shard

WIDTH = 12


def grid(num_layers: int, pp: int, tp: int, dp: int) -> Layout:
    manifests = []
    for p in range(pp):
        for _ in range(dp):
            for t in range(tp):
                layers = range(num_layers * p // pp, num_layers * (p + 1) // pp)
                box = Box((WIDTH * t // tp,), (WIDTH // tp,))
                manifests.append(tuple(Shard(LogicalTensor(f"l{k}", (WIDTH,), "uint8", 1), box) for k in layers))
    return tuple(manifests)


def vector(manifest, num_layers: int) -> np.ndarray:
    held = np.zeros((num_layers, WIDTH), dtype=bool)
    for shard in manifest:
        held[int(shard.tensor.name[1:]), shard.box.offset[0]:shard.box.offset[0] + shard.box.shape[0]] = True
    return held.ravel()


class Case:
    """A random small problem and its exhaustive answers."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.num_layers = rng.choice([4, 5, 6, 8])
        counts = rng.choice([(2, 2), (1, 2, 2), (3, 3), (2, 2, 2), (1, 1, 3), (4, 2)])
        shared = rng.random() < 0.6
        self.topology = Topology(tuple(
            Node(name, count, num_nics=rng.choice([1, 2]) if shared else count, nic_bytes_per_s=1.0, shared_nics=shared)
            for name, count in zip("abc", counts, strict=False)
        ))
        self.slots = self.topology.slots
        sizes = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 3, 1), (1, 1, 2), (2, 1, 2),
                 (1, 2, 2), (1, 1, 3), (1, 4, 1)]
        fitting = [size for size in sizes if np.prod(size) <= len(self.slots)]
        before, self.after = rng.choice(fitting), rng.choice(fitting)
        self.previous = grid(self.num_layers, *before)
        self.current = grid(self.num_layers, *self.after)
        self.where = tuple(rng.sample(self.slots, len(self.previous)))
        if before[2] > 1 and rng.random() < 0.3:  # a worker is lost, a replica remains
            self.previous = ((), *self.previous[1:])
        self.have = [vector(manifest, self.num_layers) for manifest in self.previous]
        self.need = [vector(manifest, self.num_layers) for manifest in self.current]
        self.held: dict[str, np.ndarray] = {}
        self.ports: dict[object, np.ndarray] = {}
        for slot, held in zip(self.where, self.have, strict=True):
            for table, key in ((self.held, slot.node), (self.ports, self.port(slot))):
                table[key] = table.get(key, np.zeros_like(held)) | held
        on = dict(zip(self.where, self.have, strict=True))
        nothing = np.zeros_like(self.need[0])
        self.cost = {(rank, slot): int((need & ~on.get(slot, nothing)).sum())
                     for rank, need in enumerate(self.need) for slot in self.slots}

    def port(self, slot: Slot) -> object:
        return slot.node if self.topology.node(slot.node).shared_nics else slot

    def speed(self, port: object) -> float:
        if isinstance(port, Slot):
            return 1.0
        return float(self.topology.node(str(port)).num_nics)

    def legal(self, placement) -> bool:
        size = self.after[1]
        fits = sum(node.num_slots // size for node in self.topology.nodes)
        groups = [placement[i:i + size] for i in range(0, len(placement), size)]
        whole = sum(len({slot.node for slot in group}) == 1 for group in groups)
        return whole >= min(fits, len(groups))

    def moved(self, placement) -> int:
        return sum(self.cost[rank, slot] for rank, slot in enumerate(placement))

    def seconds(self, placement, below: float = np.inf) -> float:
        """Time of the busiest port, or anything not below `below` once that is certain."""
        nothing = np.zeros_like(self.need[0])
        received: dict[object, float] = {}
        asked = np.zeros(len(nothing))
        for need, slot in zip(self.need, placement, strict=True):
            lacks = need & ~self.held.get(slot.node, nothing)
            port = self.port(slot)
            received[port] = received.get(port, 0) + lacks.sum()
            asked += lacks
        worst = max(amount / self.speed(port) for port, amount in received.items())
        names = list(self.ports)
        matrix = np.array([self.ports[name] for name in names])
        for count in range(1, len(names) + 1):
            for subset in combinations(range(len(names)), count):
                if worst >= below:
                    return worst
                others = [index for index in range(len(names)) if index not in subset]
                only_here = matrix[list(subset)].any(axis=0) & ~matrix[others].any(axis=0)
                worst = max(worst, asked[only_here].sum() / sum(self.speed(names[index]) for index in subset))
        return worst


def test_the_bottleneck_is_optimal_and_so_are_the_bytes_when_asked_for():
    optimal, worst = 0, 1.0
    for seed in range(500):
        case = Case(seed)
        options = [order for order in permutations(case.slots, len(case.current)) if case.legal(order)]
        best = np.inf
        for order in options:
            best = min(best, case.seconds(order, below=best))
        arguments = (case.current, case.slots, case.previous, case.where, case.topology)
        result = place(*arguments, group_size=case.after[1])
        assert case.legal(result.placement)
        reached = case.seconds(result.placement)
        assert abs(reached - result.bottleneck_s) <= 1e-3 * max(reached, 1)
        assert result.moved_bytes == case.moved(result.placement)
        ratio = 1.0 if reached <= best + 1e-9 else reached / best if best else np.inf
        optimal += ratio <= 1 + 1e-9
        worst = max(worst, ratio)
        if seed % 3 == 0:
            least = place(*arguments, group_size=case.after[1], least="bytes")
            assert least.moved_bytes == min(map(case.moved, options)), seed
    assert optimal >= 0.95 * 500
    assert worst <= 1.15
