"""The atom table of two shardings of one model, without listing its tensors for every rank.

Layers with the same previous and current stage share their atoms, and so do tensors that are cut alike. That leaves a
few thousand atoms for any number of ranks; for what ZeRO-1 splits there are about as many atoms as ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from etc_agent.planner.errors import PlanError
from etc_agent.planner.placing.atoms import AtomTable
from etc_agent.planner.placing.cells import Cell, cells_of
from etc_agent.planner.placing.flat_atoms import flat_atoms
from etc_agent.state.sharding import Sharding

MAX_FLAT_RANKS = 4096
"""Up to this many ranks a placement with ZeRO-1 fits in memory: with it no two ranks hold the same."""
_Parts = tuple[int, ...]
_Atom = tuple[_Parts, _Parts, _Parts, _Parts, int | None]
"""Previous stages and tp parts, current stages and tp parts, expert."""


def model_atoms(previous: Sharding, current: Sharding) -> AtomTable:
    """The atoms of a change from `previous` to `current`; the same as `atoms_of` of their layouts.

    Raises:
        PlanError: the two are not of one model, or too large with ZeRO-1.
    """
    if previous.model != current.model:
        raise PlanError(f"{previous.model.name} cannot become {current.model.name}: two different models")
    num_ranks = max(previous.config.num_ranks, current.config.num_ranks)
    if previous.model.zero1 and num_ranks > MAX_FLAT_RANKS:
        raise PlanError(
            f"{num_ranks} ranks with ZeRO-1 are more than can be planned from a description ({MAX_FLAT_RANKS}); "
            "leave ZeRO-1 out for an estimate"
        )
    copied = sum(kind.itemsize for kind in previous.model.kinds if not previous.is_sharded(kind))
    sizes = _copied_atoms(previous, current, copied) if copied else {}
    atom_bytes = list(sizes.values())
    before = _ranks(previous, [(atom[0], atom[1], atom[4]) for atom in sizes])
    after = _ranks(current, [(atom[2], atom[3], atom[4]) for atom in sizes])
    split = previous.model.bytes_per_parameter - copied
    if split:
        flat = flat_atoms(previous, current)
        atom_bytes += [elements * split for elements in flat.values()]
        before += [np.array(holders) for holders, _ in flat]
        after += [np.array(needers) for _, needers in flat]
    return AtomTable(
        np.array(atom_bytes, dtype=np.int64),
        _matrix(before, previous.config.num_ranks),
        _matrix(after, current.config.num_ranks),
    )


def _copied_atoms(previous: Sharding, current: Sharding, item_bytes: int) -> dict[_Atom, int]:
    """The bytes of each atom of what every replica holds, `item_bytes` per parameter."""
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
    return sizes


def _ranks(
    sharding: Sharding, owners: Sequence[tuple[_Parts, _Parts, int | None]]
) -> list[NDArray[np.int64]]:
    """The ranks of each (stages, tp parts, expert)."""
    known = {owner: sharding.ranks(*owner) for owner in dict.fromkeys(owners)}
    return [known[owner] for owner in owners]


def _matrix(ranks: Sequence[NDArray[np.int64]], num_ranks: int) -> csr_matrix:
    """Sparse 0/1 (ranks, atoms) from the ranks of each atom."""
    indices = np.concatenate(ranks) if ranks else np.zeros(0, np.int64)
    indptr = np.concatenate([[0], np.cumsum([len(owners) for owners in ranks])])
    return csr_matrix((np.ones(len(indices), np.int64), indices, indptr), (len(ranks), num_ranks)).T.tocsr()
