"""Assignment of rows to columns: the Hungarian method for small problems, transport between classes for large ones."""

from __future__ import annotations

from functools import reduce
from math import gcd

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import coo_matrix

_DENSE = 400
"""Up to this many rows the assignment is solved row by row."""
_ALIKE = 16
"""Classes are used only if there are this many times fewer pairs of classes than pairs of rows and columns."""


def assign_rows(
    value: NDArray[np.float64], row_class: NDArray[np.intp], column_class: NDArray[np.intp]
) -> NDArray[np.intp]:
    """The column of each row in the assignment with the highest value; -1 for rows left over where columns are fewer.

    `value`: (row classes, column classes). `row_class`: (rows,). `column_class`: (columns,). Rows of one class get
    their columns in ascending order.
    """
    if min(len(row_class), len(column_class)) <= _DENSE or value.size * _ALIKE > len(row_class) * len(column_class):
        return _hungarian(value[np.ix_(row_class, column_class)])
    supply = np.bincount(row_class, minlength=value.shape[0])
    demand = np.bincount(column_class, minlength=value.shape[1])
    flow = _transport(value, supply, demand)
    members = [list(np.flatnonzero(column_class == index)) for index in range(value.shape[1])]
    result = np.full(len(row_class), -1, dtype=np.intp)
    for index in range(value.shape[0]):
        columns = [members[target].pop(0) for target in np.flatnonzero(flow[index]) for _ in range(flow[index, target])]
        rows = np.flatnonzero(row_class == index)[: len(columns)]
        result[rows] = sorted(columns)
    return result


def _hungarian(value: NDArray[np.float64]) -> NDArray[np.intp]:
    result = np.full(value.shape[0], -1, dtype=np.intp)
    rows, columns = linear_sum_assignment(value, maximize=True)
    result[rows] = columns
    return result


def _transport(
    value: NDArray[np.float64], supply: NDArray[np.intp], demand: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Integer flows (row classes, column classes) with the highest value; the total is the size of the smaller side."""
    unit = reduce(gcd, (int(count) for count in (*supply, *demand) if count), 0)
    supply, demand = supply // unit, demand // unit
    if min(supply.sum(), demand.sum()) <= _DENSE:
        rows = np.repeat(np.arange(len(supply)), supply)
        columns = np.repeat(np.arange(len(demand)), demand)
        chosen = _hungarian(value[np.ix_(rows, columns)])
        flow = np.zeros(value.shape, dtype=np.intp)
        np.add.at(flow, (rows[chosen >= 0], columns[chosen[chosen >= 0]]), 1)
        return flow * unit
    num_rows, num_columns = value.shape
    row_of, column_of = np.divmod(np.arange(value.size), num_columns)
    sums = coo_matrix(
        (np.ones(2 * value.size), (np.concatenate([row_of, num_rows + column_of]), np.tile(np.arange(value.size), 2)))
    ).tocsr()
    scarce = supply.sum() <= demand.sum()
    of_rows, of_columns = slice(0, num_rows), slice(num_rows, None)
    exact, bounded = (of_rows, of_columns) if scarce else (of_columns, of_rows)
    scale = float(np.abs(value).max()) or 1.0
    answer = linprog(
        -value.ravel() / scale,
        A_eq=sums[exact], b_eq=supply if scarce else demand,
        A_ub=sums[bounded], b_ub=demand if scarce else supply,
        method="highs-ds",
    )
    return np.rint(answer.x).astype(np.intp).reshape(value.shape) * unit
