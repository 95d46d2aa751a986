"""Lower bounds on the migration time, from what rows (ranks or whole tp groups) lack in each bin (the slots of a
port)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

_MAX_MATCHED = 1 << 18
"""Up to this many (row, place) entries a bottleneck assignment is solved."""


def receiving_bound(times: NDArray[np.float64], count: NDArray[np.intp], room: NDArray[np.intp]) -> float:
    """A lower bound on the time of the busiest bin, in the unit of `times`.

    `times`: (kinds of rows, bins), what a bin needs to receive what a row of the kind lacks in it. `count`: (kinds,),
    rows of each kind. `room`: (bins,), rows that fit. Every row needs a place. So a bin must take the rows for which
    the other bins have no room, and some row costs at least the least time for which all rows can be matched with
    places.
    """
    return max(_crowded(times, count, room), _matched(times, count, room))


def _crowded(times: NDArray[np.float64], count: NDArray[np.intp], room: NDArray[np.intp]) -> float:
    """Equal bins share the rows for which the other bins have no room; at least one of them takes its share."""
    columns, kind_of_bin = np.unique(times, axis=1, return_inverse=True)
    num_bins = np.bincount(kind_of_bin)
    rooms = np.bincount(kind_of_bin, room).astype(np.intp)
    worst = 0.0
    for kind in range(len(num_bins)):
        must = int(count.sum()) - (int(room.sum()) - int(rooms[kind]))
        each = -(-must // int(num_bins[kind]))
        if each > 0:
            order = np.argsort(columns[:, kind])
            worst = max(worst, float(np.repeat(columns[order, kind], count[order])[:each].sum()))
    return worst


def _matched(times: NDArray[np.float64], count: NDArray[np.intp], room: NDArray[np.intp]) -> float:
    """The smallest t with an assignment of every row to a place where it costs at most t (bottleneck assignment)."""
    least = float(times.min(axis=1).max())
    if int(count.sum()) * int(room.sum()) > _MAX_MATCHED:
        return least
    at = np.repeat(np.repeat(times, count, axis=0), room, axis=1)
    values = np.unique(at[at >= least])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if (maximum_bipartite_matching(csr_matrix(at <= values[middle]), perm_type="column") >= 0).all():
            high = middle
        else:
            low = middle + 1
    return float(values[low])
