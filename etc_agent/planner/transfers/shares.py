"""How much of each demand its holders send, where the holders of one tensor's boxes overlap only in part.

Where two boxes have the same holders, or none in common, all holders of a box send alike. Otherwise a worker that holds
several boxes would send more than one that holds a single one, so shares are moved until all send about as much. The
arithmetic is of integers, so that all workers find the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etc_agent.planner.transfers.demands import Demand, Workers

_MOST_PASSES = 32


def shares(demands: Sequence[Demand], num_sent: Sequence[int]) -> list[Workers | None]:
    """For each demand the elements that each of its `holders` sends, or None where all send alike.

    Args:
        num_sent: how often each demand's box leaves its holders.
    """
    distinct = {demand.holders.tobytes(): demand.holders for demand in demands}
    everybody = np.concatenate(list(distinct.values())) if distinct else np.empty(0, dtype=np.int64)
    if len(np.unique(everybody)) == len(everybody):
        return [None] * len(demands)
    order = sorted(range(len(demands)), key=lambda index: demands[index].box)
    sizes = [demand.box.num_elements * times for demand, times in zip(demands, num_sent, strict=True)]
    load = dict.fromkeys(everybody.tolist(), 0)
    parts = [[0] * len(demand.holders) for demand in demands]
    for _ in range(_MOST_PASSES):
        before = [list(part) for part in parts]
        for index in order:
            holders = demands[index].holders.tolist()
            for holder, part in zip(holders, parts[index], strict=True):
                load[holder] -= part
            parts[index] = filled(sizes[index], [load[holder] for holder in holders])
            for holder, part in zip(holders, parts[index], strict=True):
                load[holder] += part
        if parts == before:
            break
    return [np.array(part, dtype=np.int64) for part in parts]


def filled(amount: int, loads: Sequence[int]) -> list[int]:
    """`amount` poured over `loads` so that the lowest rise to one level, as water does; the result adds up to it."""
    order = sorted(range(len(loads)), key=lambda index: (loads[index], index))
    below, reached = 0, 0
    for reached, index in enumerate(order, 1):
        below += loads[index]
        if reached == len(order) or (amount + below) <= reached * loads[order[reached]]:
            break
    level, rest = divmod(amount + below, reached)
    found = [0] * len(loads)
    for place, index in enumerate(order[:reached]):
        found[index] = level + (place < rest) - loads[index]
    return found
