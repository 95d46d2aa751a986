"""The best placement of a small job by integer programming: least time of the busiest port, then least bytes.

The least bytes do not imply the least time, since the busiest port counts; and where replicas exist, the choice of
sources is part of the problem. Both are linear: x[i, s] places rank i on slot s, f[q, p] is what port p sends of the
parts q that can leave through the same ports, and T bounds every port's time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix, csr_matrix, vstack

MAX_VARIABLES = 160
"""Up to this many ranks x slots a placement is solved exactly."""
_NODE_LIMIT = 4000
"""Branch-and-bound nodes. A limit on work gives the same answer everywhere, unlike a limit on time."""


@dataclass(frozen=True, slots=True, eq=False)
class SmallProblem:
    """Bytes are float64 in any unit. r ranks, s slots, n nodes, p ports, q distinct sets of source ports.

    `allowed`: (r, s). `node_of_slot`, `port_of_slot`: (s,). `speed`: (p,). `missing`: (r, n, q), what rank r lacks on
    node n, by where it can come from. `sources`: (q, p), 0/1. `whole_groups`: ranks that must share a node.
    `bytes_between`, `bytes_all`: (r, s). `preference`: (r, s), small costs that decide between equals.
    """

    allowed: NDArray[np.bool_]
    node_of_slot: NDArray[np.intp]
    port_of_slot: NDArray[np.intp]
    speed: NDArray[np.float64]
    missing: NDArray[np.float64]
    sources: NDArray[np.float64]
    whole_groups: tuple[tuple[int, ...], ...]
    bytes_between: NDArray[np.float64]
    bytes_all: NDArray[np.float64]
    preference: NDArray[np.float64]

    def solve(self, *, least: str) -> NDArray[np.intp] | None:
        """Rank -> slot; None if none was found within the limit. `least`: minimise ``time`` or ``bytes``."""
        ranks, slots = np.nonzero(self.allowed)
        scale = max(float(self.bytes_all.max()), 1.0)
        if least == "bytes":
            cost = self.bytes_all[ranks, slots] / scale + 1e-4 * self._second(ranks, slots, scale)
            constraints = self._places(ranks, slots, len(ranks))
            return self._run(ranks, slots, cost, constraints, len(ranks), np.inf)
        pairs = np.argwhere(self.sources > 0)
        size = len(ranks) + len(pairs) + 1
        constraints = [*self._places(ranks, slots, size), *self._traffic(ranks, slots, pairs, size, scale)]
        cost = np.zeros(size)
        cost[-1] = 1.0
        first = self._milp(cost, constraints, size, np.inf, len(ranks))
        if first is None:
            return None
        cost = np.zeros(size)
        cost[: len(ranks)] = self._second(ranks, slots, scale)
        limit = float(first[-1]) * (1 + 1e-7) + 1e-9
        return self._run(ranks, slots, cost, constraints, size, limit)

    def _second(self, ranks: NDArray[np.intp], slots: NDArray[np.intp], scale: float) -> NDArray[np.float64]:
        """Bytes between nodes, then all bytes, then preference, as one cost."""
        between = self.bytes_between[ranks, slots] / scale
        return between + self.bytes_all[ranks, slots] / scale / 64 + 1e-6 * self.preference[ranks, slots]

    def _run(
        self, ranks: NDArray[np.intp], slots: NDArray[np.intp], cost: NDArray[np.float64],
        constraints: list[LinearConstraint], size: int, limit: float,
    ) -> NDArray[np.intp] | None:
        answer = self._milp(cost, constraints, size, limit, len(ranks))
        if answer is None:
            return None
        taken = answer[: len(ranks)] > 0.5
        chosen = np.full(self.allowed.shape[0], -1, dtype=np.intp)
        chosen[ranks[taken]] = slots[taken]
        return chosen if (chosen >= 0).all() else None

    def _milp(
        self, cost: NDArray[np.float64], constraints: list[LinearConstraint], size: int, limit: float, num_binary: int
    ) -> NDArray[np.float64] | None:
        integrality = np.zeros(size)
        integrality[:num_binary] = 1
        upper = np.full(size, np.inf)
        upper[:num_binary] = 1
        if size > num_binary:
            upper[-1] = limit
        answer = milp(
            cost, constraints=constraints, integrality=integrality, bounds=Bounds(np.zeros(size), upper),
            options={"node_limit": _NODE_LIMIT, "mip_rel_gap": 1e-6},
        )
        return None if answer.x is None else np.asarray(answer.x)

    def _places(self, ranks: NDArray[np.intp], slots: NDArray[np.intp], size: int) -> list[LinearConstraint]:
        num_ranks, num_slots = self.allowed.shape
        count, column = np.ones(len(ranks)), np.arange(len(ranks))
        one_slot = csr_matrix((count, (ranks, column)), (num_ranks, size))
        one_rank = csr_matrix((count, (slots, column)), (num_slots, size))
        found = [LinearConstraint(one_slot, 1, 1), LinearConstraint(one_rank, 0, 1)]
        num_nodes = int(self.node_of_slot.max()) + 1
        at = self.node_of_slot[slots]

        def on_nodes(rank: int) -> csr_matrix:
            return csr_matrix((count * (ranks == rank), (at, column)), (num_nodes, size))

        rows = [on_nodes(group[0]) - on_nodes(rank) for group in self.whole_groups for rank in group[1:]]
        if rows:
            found.append(LinearConstraint(vstack(rows), 0, 0))
        return found

    def _traffic(
        self, ranks: NDArray[np.intp], slots: NDArray[np.intp], pairs: NDArray[np.intp], size: int, scale: float
    ) -> list[LinearConstraint]:
        num_ports, num_sets = len(self.speed), len(self.sources)
        speed = self.speed / self.speed.max()
        lacking = self.missing[ranks, self.node_of_slot[slots]] / scale
        flow = len(ranks) + np.arange(len(pairs))
        column = np.arange(len(ranks))
        time = csr_matrix((speed, (np.arange(num_ports), np.full(num_ports, size - 1))), (num_ports, size))
        into = csr_matrix((lacking.sum(axis=1), (self.port_of_slot[slots], column)), (num_ports, size))
        out = csr_matrix((np.ones(len(pairs)), (pairs[:, 1], flow)), (num_ports, size))
        found = [LinearConstraint(into - time, -np.inf, 0), LinearConstraint(out - time, -np.inf, 0)]
        if num_sets:
            entry, of = np.nonzero(lacking)
            asked = coo_matrix((lacking[entry, of], (of, column[entry])), (num_sets, size)).tocsr()
            given = csr_matrix((np.ones(len(pairs)), (pairs[:, 0], flow)), (num_sets, size))
            found.append(LinearConstraint(given - asked, 0, 0))
        return found
