"""Holdings of two shardings of one model, without listing its tensors rank by rank.

Layers that have the same previous and current stage share their atoms, and so do tensors that are cut alike; what is
left is a few thousand atoms for any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from scipy.sparse import csr_matrix

from etc_agent.planner.errors import PlanError
from etc_agent.planner.holdings import Holdings, holdings_of
from etc_agent.state.model import TensorSpec
from etc_agent.state.sharding import Sharding

MAX_LISTED_RANKS = 1024
"""Ranks up to which layouts are listed."""
_Parts = tuple[int, ...]
_Atom = tuple[_Parts, _Parts, _Parts, _Parts, int | None]
"""Previous stages and tp parts, current stages and tp parts, expert."""


def model_holdings(previous: Sharding, current: Sharding) -> Holdings:
    """The atoms of a change from `previous` to `current`; the same as `holdings_of` of their layouts.

    With ZeRO-1 the ranges of the flat buffers make the atoms as many as the ranks, so the layouts are listed then.

    Raises:
        PlanError: the two are not of one model, or too large with ZeRO-1.
    """
    if previous.model != current.model:
        raise PlanError(f"{previous.model.name} cannot become {current.model.name}: two different models")
    if previous.model.zero1:
        num_ranks = max(previous.config.num_ranks, current.config.num_ranks)
        if num_ranks > MAX_LISTED_RANKS:
            raise PlanError(
                f"{num_ranks} ranks with ZeRO-1 are more than can be planned from a description ({MAX_LISTED_RANKS}); "
                "leave ZeRO-1 out for an estimate"
            )
        return holdings_of(previous.layout(), current.layout())
    item_bytes = previous.model.bytes_per_parameter
    sizes: dict[_Atom, int] = {}
    for (specs, before), (_, after) in zip(previous.sections(), current.sections(), strict=True):
        cells: dict[tuple[_Parts, _Parts, int | None], int] = {}
        cuts: dict[tuple[object, ...], list[Cell]] = {}
        for spec in specs:
            across = prod(spec.shape) // (1 if spec.tp_dim is None else spec.shape[spec.tp_dim])
            alike = (spec.tp_dim is None, spec.blocks)
            if alike not in cuts:
                cuts[alike] = list(cells_of(spec, previous.config.tp, current.config.tp))
            for cell in cuts[alike]:
                key = (cell.before, cell.after, spec.expert)
                cells[key] = cells.get(key, 0) + (cell.end - cell.start) * across * item_bytes
        for (stages_before, stages_after), count in Counter(zip(before, after, strict=True)).items():
            for (parts_before, parts_after, expert), size in cells.items():
                atom = (stages_before, parts_before, stages_after, parts_after, expert)
                sizes[atom] = sizes.get(atom, 0) + size * count
    return Holdings(
        np.array(list(sizes.values()), dtype=np.int64),
        _matrix(previous, [(atom[0], atom[1], atom[4]) for atom in sizes]),
        _matrix(current, [(atom[2], atom[3], atom[4]) for atom in sizes]),
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """[start, end) along the dim that tp cuts, held by the tp parts `before` and needed by the parts `after`.

    A tensor that tp does not cut has one cell, [0, 1).
    """

    start: int
    end: int
    before: _Parts
    after: _Parts


def cells_of(spec: TensorSpec, tp_before: int, tp_after: int) -> Iterator[Cell]:
    """The cells of a tensor of `spec` between all cuts of both generations."""
    if spec.tp_dim is None:
        yield Cell(0, 1, tuple(range(tp_before)), tuple(range(tp_after)))
        return
    sides = [[spec.intervals(tp, part) for part in range(tp)] for tp in (tp_before, tp_after)]
    cuts = sorted({edge for side in sides for intervals in side for interval in intervals for edge in interval})
    number = {edge: index for index, edge in enumerate(cuts)}
    owners: tuple[list[list[int]], list[list[int]]] = ([[] for _ in cuts], [[] for _ in cuts])
    for side, found in zip(sides, owners, strict=True):
        for part, intervals in enumerate(side):
            for low, high in intervals:
                for index in range(number[low], number[high]):
                    found[index].append(part)
    for index, (start, end) in enumerate(pairwise(cuts)):
        yield Cell(start, end, tuple(owners[0][index]), tuple(owners[1][index]))


def _matrix(sharding: Sharding, owners: Sequence[tuple[_Parts, _Parts, int | None]]) -> csr_matrix:
    """Sparse 0/1 (ranks, atoms) from the stages, tp parts and expert of each atom."""
    ranks = {owner: sharding.ranks(*owner) for owner in dict.fromkeys(owners)}
    columns = [ranks[owner] for owner in owners]
    indices = np.concatenate(columns) if columns else np.zeros(0, np.int64)
    indptr = np.concatenate([[0], np.cumsum([len(column) for column in columns])])
    shape = (len(owners), sharding.config.num_ranks)
    return csr_matrix((np.ones(len(indices), np.int64), indices, indptr), shape).T.tocsr()
