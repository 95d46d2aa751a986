"""Redundancy: who keeps copies of whose state in memory, and which losses a job survives (docs/failures.md).

A box whose holders are all in one *failure domain* (a node; a worker where the job has one node) is lost with that
domain. One of its holders, the *owner*, sends it to a *keeper*: a worker of another domain. A keeper keeps *blocks*: a
block is the copy of one piece of an owner's state (`peer_blocks`), or the XOR of pieces of several owners
(`parity.parity_blocks`). Everything here follows from the manifests and the placement alone, so every worker finds the
same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from etc_agent.planner.placing.atoms import atoms_of
from etc_agent.state.algebra import subtract_all
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Manifest, Shard


@dataclass(frozen=True, slots=True)
class Piece:
    """`parts` of worker `owner`, in this order. Each part lies in one shard of the owner."""

    owner: int
    parts: Manifest

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.parts)


@dataclass(frozen=True, slots=True)
class Block:
    """Worker `keeper` keeps the XOR of `pieces`, each of another owner and filled up with zeros to the longest; of a
    single piece this is a copy."""

    keeper: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return max(piece.num_bytes for piece in self.pieces)

    def rebuilt(self, lost: Collection[int]) -> Piece | None:
        """The piece that this block and the other owners' pieces give back once the workers `lost` are gone; None
        where they cannot, or need not."""
        gone = [piece for piece in self.pieces if piece.owner in lost]
        return gone[0] if len(gone) == 1 and self.keeper not in lost else None


def peer_blocks(manifests: Layout, nodes: Sequence[int]) -> tuple[Block, ...]:
    """A copy of what each owner owns, by owner; empty for a job of one worker.

    Of several holders in one domain, the one that owns the fewest bytes so far owns the next box. Owners are given to
    keepers by size, the largest first, each to the worker of another domain that keeps the fewest bytes so far; of
    equals to the next one after the owner's own domain, so that workers that hold alike form a ring of nodes.

    Args:
        manifests: worker -> all that it holds.
        nodes: worker -> the number of its node.
    """
    domains = domains_of(nodes)
    parts = owned_parts(manifests, domains)
    kept_bytes = [0] * len(manifests)
    found: dict[int, Block] = {}
    for owner in sorted(parts, key=lambda each: (-num_bytes(parts[each]), each)):
        others = [worker for worker, domain in enumerate(domains) if domain != domains[owner]]
        if not others:
            continue
        num_domains = max(domains) + 1
        keeper = min(
            others,
            key=lambda worker: (kept_bytes[worker], (domains[worker] - domains[owner]) % num_domains, worker),
        )
        found[owner] = block = Block(keeper, (Piece(owner, tuple(parts[owner])),))
        kept_bytes[keeper] += block.num_bytes
    return tuple(found[owner] for owner in sorted(found))


def with_rebuilt(manifests: Layout, blocks: Sequence[Block], lost: Collection[int]) -> Layout:
    """Worker -> what it holds, and what its blocks give back once the workers `lost` are gone."""
    held = [list(manifest) for manifest in manifests]
    for block in blocks:
        if (piece := block.rebuilt(lost)) is not None:
            held[block.keeper] += piece.parts
    return tuple(map(tuple, held))


def with_copies(manifests: Layout, blocks: Sequence[Block]) -> Layout:
    """Worker -> what it holds, and what it keeps whole copies of."""
    held = [list(manifest) for manifest in manifests]
    for block in blocks:
        if len(block.pieces) == 1:
            held[block.keeper] += block.pieces[0].parts
    return tuple(map(tuple, held))


def lost_bytes(manifests: Layout, held: Layout, lost: Collection[int]) -> int:
    """How many bytes of the state nobody has once the workers `lost` are gone. `held`: worker -> what it has, copies
    that it keeps included."""
    survivors = tuple(() if worker in lost else manifest for worker, manifest in enumerate(held))
    table = atoms_of(survivors, manifests)
    holders = np.asarray(table.previous.sum(axis=0)).ravel()
    return int(table.atom_bytes[holders == 0].sum())


@dataclass(frozen=True, slots=True)
class Survival:
    """Any `num_nodes` whole nodes may be lost together, or any `num_workers` workers; 0 where one is too many."""

    num_nodes: int
    num_workers: int

    def __str__(self) -> str:
        if self.num_nodes:
            return _any(self.num_nodes, "node")
        return _any(self.num_workers, "worker") if self.num_workers else "nothing"


def survival_with(manifests: Layout, blocks: Sequence[Block], nodes: Sequence[int]) -> Survival:
    """Which losses leave every box of the state with a worker, or with blocks that give it back. `blocks`: made for the
    same arguments."""
    found = survival(with_copies(manifests, blocks), nodes)
    if all(len(block.pieces) == 1 for block in blocks):
        return found
    # Any one failure domain: that is what the blocks are made for.
    return Survival(max(found.num_nodes, int(len(set(nodes)) > 1)), max(found.num_workers, 1))


def survival(held: Layout, nodes: Sequence[int]) -> Survival:
    """Which losses leave every box of the state with a worker. `held`: as for `lost_bytes`. A job with a single node or
    worker survives the loss of none."""
    table = atoms_of(held, held)
    if not table.atom_bytes.size:
        return Survival(0, 0)
    numbers = _numbered(nodes)
    on_nodes = table.union(np.array(numbers, dtype=np.intp), max(numbers) + 1)
    fewest_nodes, fewest_workers = (int(rows.sum(axis=0).min()) for rows in (on_nodes, table.previous))
    return Survival(fewest_nodes - 1, fewest_workers - 1)


def _any(number: int, what: str) -> str:
    return f"any one {what}" if number == 1 else f"any {number} {what}s"


def domains_of(nodes: Sequence[int]) -> list[int]:
    """Worker -> number of its failure domain."""
    return _numbered(nodes) if len(set(nodes)) > 1 else list(range(len(nodes)))


def _numbered(nodes: Sequence[int]) -> list[int]:
    """Nodes numbered from 0 in the order of their first worker."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return [numbers[node] for node in nodes]


def owned_parts(manifests: Layout, domains: Sequence[int]) -> dict[int, list[Shard]]:
    """Owner -> its parts. Tensors of one shape with the same holders are cut once."""
    holders: dict[str, tuple[LogicalTensor, list[tuple[int, Box]]]] = {}
    for worker, manifest in enumerate(manifests):
        for shard in manifest:
            if shard.box.num_elements:
                holders.setdefault(shard.tensor.name, (shard.tensor, []))[1].append((worker, shard.box))
    cut: dict[tuple[tuple[int, Box], ...], list[tuple[Box, tuple[int, ...]]]] = {}
    owned_bytes = [0] * len(manifests)
    parts: dict[int, list[Shard]] = {}
    for _, (tensor, held) in sorted(holders.items()):
        key = tuple(held)
        if key not in cut:
            cut[key] = _exposed(held, domains)
        for box, candidates in cut[key]:
            part = Shard(tensor, box)
            owner = min(candidates, key=lambda worker: (owned_bytes[worker], worker))
            owned_bytes[owner] += part.num_bytes
            parts.setdefault(owner, []).append(part)
    return parts


def _exposed(held: Sequence[tuple[int, Box]], domains: Sequence[int]) -> list[tuple[Box, tuple[int, ...]]]:
    """The disjoint boxes of one tensor that a single domain holds, each with its holders there. `held`: (worker, box).
    """
    by_domain: dict[int, dict[Box, list[int]]] = {}
    for worker, box in held:
        by_domain.setdefault(domains[worker], {}).setdefault(box, []).append(worker)
    found = []
    for domain, boxes in by_domain.items():
        taken = list(dict.fromkeys(box for other, theirs in by_domain.items() if other != domain for box in theirs))
        for box, workers in boxes.items():
            found += [(rest, tuple(workers)) for rest in subtract_all(box, taken)]
            taken.append(box)
    return found


def num_bytes(parts: Sequence[Shard]) -> int:
    return sum(part.num_bytes for part in parts)
