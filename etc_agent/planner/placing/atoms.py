"""Two layouts as sets of atoms: the form in which costs, placements and link loads are computed.

An *atom* is the largest part of the state that every previous worker holds, and every current rank needs, either
completely or not at all. All layers with the same owners form one atom, so there are few atoms whatever the model's
size: the bytes common to a rank and a worker are a sparse matrix product, and what a node holds is a union of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from etc_agent.planner.errors import PlanError
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Manifest

_Owned = tuple[int, int, Box]
"""(0 for the previous layout or 1 for the current one, worker or rank, box)."""


@dataclass(frozen=True, slots=True, eq=False)
class AtomTable:
    """`atom_bytes`: int64 (atoms,). `previous`, `current`: sparse 0/1 matrices (workers, atoms) and (ranks, atoms)."""

    atom_bytes: NDArray[np.int64]
    previous: csr_matrix
    current: csr_matrix

    @property
    def num_ranks(self) -> int:
        return int(self.current.shape[0])

    @property
    def num_workers(self) -> int:
        return int(self.previous.shape[0])

    def needed_bytes(self) -> NDArray[np.int64]:
        """Bytes that each current rank needs, (ranks,)."""
        return np.asarray(self.current @ self.atom_bytes, dtype=np.int64)

    def common_bytes(self) -> csr_matrix:
        """Bytes that a rank needs and a worker holds, sparse (ranks, workers)."""
        return (self.current.multiply(self.atom_bytes).tocsr() @ self.previous.T).tocsr()

    def cost_matrix(self) -> NDArray[np.int64]:
        """c[i, j] = bytes that current rank i needs and previous worker j does not hold; dense (ranks, workers).

        Exact: size minus the product of the overlaps of all axes, since atoms are boxes (the paper's Fig. 5 merges
        the axes differently, see `etc_agent.planner.paper`).
        """
        return self.needed_bytes()[:, None] - self.common_bytes().toarray().astype(np.int64)

    def current_classes(self) -> tuple[NDArray[np.intp], csr_matrix]:
        """(rank -> class, one row per class): ranks that need the same are of one class."""
        return _classes(self.current)

    def previous_classes(self) -> tuple[NDArray[np.intp], csr_matrix]:
        """(worker -> class, one row per class): workers that hold the same are of one class."""
        return _classes(self.previous)

    def union(self, group_of: NDArray[np.intp], num_groups: int) -> csr_matrix:
        """What groups of workers hold together, sparse 0/1 (groups, atoms). `group_of`: (workers,)."""
        workers = np.arange(self.num_workers)
        select = csr_matrix((np.ones(len(workers), np.int64), (group_of, workers)), (num_groups, self.num_workers))
        held = (select @ self.previous).tocsr()
        held.data[:] = 1
        return held


def atoms_of(previous: Layout, current: Layout) -> AtomTable:
    """The atoms of two layouts. Tensors with the same shape and owners are cut once.

    Raises:
        PlanError: the layouts disagree about a tensor's shape or item size.
    """
    owners = _owners(previous, current)
    weights: dict[tuple[_Owned, ...], int] = {}
    for tensor, boxes in owners.values():
        key = tuple(boxes)
        weights[key] = weights.get(key, 0) + tensor.itemsize
    sizes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for owned, weight in weights.items():
        for holders, elements in _cells(owned):
            sizes[holders] = sizes.get(holders, 0) + elements * weight
    atoms = sorted(sizes)
    atom_bytes = np.array([sizes[holders] for holders in atoms], dtype=np.int64)
    return AtomTable(
        atom_bytes,
        _rows([holders[0] for holders in atoms], len(previous)),
        _rows([holders[1] for holders in atoms], len(current)),
    )


def _owners(previous: Layout, current: Layout) -> dict[str, tuple[LogicalTensor, list[_Owned]]]:
    """Every tensor of the current layout with all who hold or need a part of it."""
    found: dict[str, tuple[LogicalTensor, list[_Owned]]] = {}
    sides: tuple[tuple[int, Sequence[Manifest]], ...] = ((1, current), (0, previous))
    for side, layout in sides:
        for owner, manifest in enumerate(layout):
            for shard in manifest:
                entry = found.get(shard.tensor.name)
                if entry is None:
                    if side == 0:
                        continue
                    entry = found[shard.tensor.name] = (shard.tensor, [])
                elif (entry[0].shape, entry[0].itemsize) != (shard.tensor.shape, shard.tensor.itemsize):
                    raise PlanError(f"{shard.tensor.name}: {shard.tensor} in one layout, {entry[0]} in the other")
                entry[1].append((side, owner, shard.box))
    return found


def _cells(owned: Sequence[_Owned]) -> list[tuple[tuple[tuple[int, ...], tuple[int, ...]], int]]:
    """((workers that hold it, ranks that need it), elements) of every cell between the borders of all boxes."""
    owned = [entry for entry in owned if entry[2].num_elements]
    if not owned:
        return []
    num_dims = len(owned[0][2].shape)
    cuts = [
        sorted({edge for _, _, box in owned for edge in (box.offset[dim], box.offset[dim] + box.shape[dim])})
        for dim in range(num_dims)
    ]
    index = [{edge: number for number, edge in enumerate(edges)} for edges in cuts]
    holders: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for side, owner, box in owned:
        spans = [
            range(index[dim][box.offset[dim]], index[dim][box.offset[dim] + box.shape[dim]]) for dim in range(num_dims)
        ]
        for cell in product(*spans):
            entry = holders.setdefault(cell, ([], []))
            if not entry[side] or entry[side][-1] != owner:
                entry[side].append(owner)
    extents = [[end - start for start, end in pairwise(edges)] for edges in cuts]
    return [
        ((tuple(sorted(workers)), tuple(sorted(ranks))), prod(extents[dim][at] for dim, at in enumerate(cell)))
        for cell, (workers, ranks) in holders.items()
        if ranks
    ]


def _rows(owners: Sequence[Sequence[int]], num_rows: int) -> csr_matrix:
    """Sparse 0/1 (rows, atoms) from the rows of each atom."""
    rows = np.array([row for holders in owners for row in holders], dtype=np.int64)
    columns = np.repeat(np.arange(len(owners)), [len(holders) for holders in owners])
    return csr_matrix((np.ones(len(rows), np.int64), (rows, columns)), (num_rows, len(owners)))


def _classes(rows: csr_matrix) -> tuple[NDArray[np.intp], csr_matrix]:
    """Equal rows get one class, numbered by first appearance. Compares 64-bit sums of a fixed random word per atom."""
    words = np.random.default_rng(0x5EED).integers(-(1 << 62), 1 << 62, rows.shape[1], dtype=np.int64)
    sums = rows @ words
    _, first, inverse = np.unique(sums, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], rows[np.sort(first)]
