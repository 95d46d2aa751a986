"""The method of the ETC paper as printed, kept as policy ``paper`` for comparison.

Costs count layers and tp slices (Fig. 4, Fig. 5), the axes are merged by the printed rules, pairs come from
Algorithm 1, and every dp group is isolated: it takes its state from its own former workers only, and a new group is one
whole copy (section III-C). The virtual rank allocator (Algorithm 2) is not repeated: docs/planner.md says what is wrong
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Placement, Slot, Topology
from etc_agent.planner.errors import PlanError
from etc_agent.planner.placing.atoms import AtomTable
from etc_agent.planner.placing.loads import Fabric, ports_of
from etc_agent.planner.placing.placement import Sketch


def axis_cost(num_units: int, num_previous: int, num_current: int) -> NDArray[np.int64]:
    """Cost along one axis, (current parts, previous parts): units that the one needs and the other lacks (Fig. 4)."""
    def span(part: int, parts: int) -> set[int]:
        return set(range(num_units * part // parts, num_units * (part + 1) // parts))

    previous = [span(part, num_previous) for part in range(num_previous)]
    return np.array([[len(span(part, num_current) - held) for held in previous] for part in range(num_current)])


def printed_merge(pp_cost: NDArray[np.int64], tp_cost: NDArray[np.int64], num_slices: int) -> NDArray[np.float64]:
    """Merged cost by the rules printed in Fig. 5: no common layer costs the maximum, else tp / LCM times pp.

    Rows are current (pp, tp), columns previous (pp, tp), tp fastest. It is zero wherever the layers are the same, even
    if the slices have nothing in common.
    """
    merged = np.kron(pp_cost, np.ones_like(tp_cost)).astype(np.float64)
    below = merged < pp_cost.max()
    merged[below] *= np.kron(np.ones_like(pp_cost), tp_cost)[below] / num_slices
    return merged


def exact_merge(
    pp_cost: NDArray[np.int64], tp_cost: NDArray[np.int64], num_layers: int, num_slices: int
) -> NDArray[np.int64]:
    """What Fig. 5 draws, and what is right: L * W - (L - c_pp) * (W - c_tp).

    `num_layers`, `num_slices`: L and W, units that a current rank needs along each axis.
    """
    return num_layers * num_slices - np.kron(num_layers - pp_cost, num_slices - tp_cost)


def solve_sketch(cost: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Algorithm 1: pairs (current, previous) of least cost; on a matrix that is not square the rest stays unpaired."""
    rows, columns = linear_sum_assignment(cost)
    return [(int(row), int(column)) for row, column in zip(rows, columns, strict=True)]


def paper_sketch(
    table: AtomTable,
    num_layers: int,
    previous: ParallelConfig,
    current: ParallelConfig,
    slots: Sequence[Slot],
    previous_placement: Placement,
    topology: Topology,
    *,
    merge: Literal["printed", "drawn"] = "printed",
) -> Sketch:
    """Placement and costs by the paper's method; what it costs is counted in exact bytes.

    `merge`: the rule printed in Fig. 5 or the matrix drawn there (the exact one; only the isolation of dp remains).

    Paired ranks stay on their worker's slot; the others go to slots without a worker first, in order.

    Raises:
        PlanError: too few slots, or axes that the paper does not know.
    """
    if max(previous.ep, previous.cp, current.ep, current.cp) > 1:
        raise PlanError("policy paper knows pp, tp and dp only; leave out ep and cp or use the default policy")
    width = lcm(previous.tp, current.tp)
    pp_cost, tp_cost = axis_cost(num_layers, previous.pp, current.pp), axis_cost(width, previous.tp, current.tp)
    if merge == "printed":
        cost = printed_merge(pp_cost, tp_cost, width)
    else:
        cost = exact_merge(pp_cost, tp_cost, -(-num_layers // current.pp), width // current.tp).astype(np.float64)
    pairs = [
        (_in_group(row, group, current), _in_group(column, group, previous))
        for group in range(min(previous.dp, current.dp))
        for row, column in solve_sketch(cost)
    ]
    where = {rank: previous_placement[worker] for rank, worker in pairs}
    workers_on = set(previous_placement)
    taken = set(where.values())
    free = [slot for slot in slots if slot not in workers_on] + [
        slot for slot in slots if slot in workers_on and slot not in taken
    ]
    if len(free) + len(where) < current.num_ranks:
        raise PlanError(f"{current.num_ranks} ranks need as many slots; {len(free) + len(where)} are available")
    rest = iter(free)
    placement = tuple(where[rank] if rank in where else next(rest) for rank in range(current.num_ranks))
    return _account(table, previous, current, pairs, placement, previous_placement, slots, topology)


def _in_group(index: int, group: int, config: ParallelConfig) -> int:
    """The virtual rank of (pp, tp) number `index` in dp group `group`."""
    pp, tp = divmod(index, config.tp)
    return (pp * config.dp + group) * config.tp + tp


def _account(
    table: AtomTable,
    previous: ParallelConfig,
    current: ParallelConfig,
    pairs: Sequence[tuple[int, int]],
    placement: Placement,
    previous_placement: Placement,
    slots: Sequence[Slot],
    topology: Topology,
) -> Sketch:
    """Exact bytes, each dp group from its own source group alone (round robin for new ones)."""
    ranks_of = np.array([current.coordinate(rank).dp for rank in range(current.num_ranks)])
    workers_of = np.array([previous.coordinate(worker).dp for worker in range(previous.num_ranks)])
    needed, common = table.needed_bytes(), table.common_bytes()
    moved = int(needed.sum()) - sum(int(common[rank, worker]) for rank, worker in pairs)
    between = 0.0
    everywhere = list(dict.fromkeys([*slots, *previous_placement]))
    speed = ports_of(topology, everywhere).bytes_per_s
    sent, received = np.zeros(len(speed)), np.zeros(len(speed))
    for group in range(current.dp):
        ranks = np.flatnonzero(ranks_of == group)
        workers = np.flatnonzero(workers_of == group % previous.dp)
        # A dp group that is new takes whole copies, even next to a worker that has the state.
        part = AtomTable(table.atom_bytes, table.previous[workers], table.current[ranks])
        fabric = Fabric.build(part, [previous_placement[worker] for worker in workers], everywhere, topology)
        loads = fabric.loads([placement[rank] for rank in ranks])
        sent += loads.sent
        received += loads.received
        between += float(loads.received.sum())
    seconds = float((np.maximum(sent, received) / speed).max())
    changed = sum(
        rank >= len(previous_placement) or previous_placement[rank] != slot for rank, slot in enumerate(placement)
    )
    return Sketch(placement, tuple(sorted(pairs)), moved, round(between), seconds, changed)
