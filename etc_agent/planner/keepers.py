"""Redundancy: who keeps copies of whose state in memory, and which losses a job survives (docs/failures.md).

A box whose holders are all in one *failure domain* (a node; a worker where the job has one node) is lost with that
domain. One of its holders, the *owner*, sends it to its *keeper*: a worker of another domain. Everything here follows
from the manifests and the placement alone, so every worker finds the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etc_agent.planner.atoms import atoms_of
from etc_agent.state.algebra import subtract_all
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Manifest, Shard


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """Worker `keeper` keeps a copy of `parts` of worker `owner`, in this order. Each part lies in one shard of the
    owner."""

    owner: int
    keeper: int
    parts: Manifest

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def peer_copies(manifests: Layout, nodes: Sequence[int]) -> tuple[PeerCopy, ...]:
    """The copies that let the job lose any one failure domain, by owner; empty for a job of one worker.

    Of several holders in one domain, the one that owns the fewest bytes so far owns the next box. Owners are given to
    keepers by size, the largest first, each to the worker of another domain that keeps the fewest bytes so far; of
    equals to the next one after the owner's own domain, so that workers that hold alike form a ring of nodes.

    Args:
        manifests: worker -> all that it holds.
        nodes: worker -> the number of its node.
    """
    domains = _domains(nodes)
    parts = _owned_parts(manifests, domains)
    kept_bytes = [0] * len(manifests)
    found = []
    for owner in sorted(parts, key=lambda each: (-_num_bytes(parts[each]), each)):
        others = [worker for worker, domain in enumerate(domains) if domain != domains[owner]]
        if not others:
            continue
        num_domains = max(domains) + 1
        keeper = min(
            others,
            key=lambda worker: (kept_bytes[worker], (domains[worker] - domains[owner]) % num_domains, worker),
        )
        copy = PeerCopy(owner, keeper, tuple(parts[owner]))
        kept_bytes[keeper] += copy.num_bytes
        found.append(copy)
    return tuple(sorted(found, key=lambda copy: copy.owner))


def with_copies(manifests: Layout, copies: Sequence[PeerCopy]) -> Layout:
    """Worker -> what it holds and what it keeps."""
    held = [list(manifest) for manifest in manifests]
    for copy in copies:
        held[copy.keeper] += copy.parts
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


def _domains(nodes: Sequence[int]) -> list[int]:
    """Worker -> number of its failure domain."""
    return _numbered(nodes) if len(set(nodes)) > 1 else list(range(len(nodes)))


def _numbered(nodes: Sequence[int]) -> list[int]:
    """Nodes numbered from 0 in the order of their first worker."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return [numbers[node] for node in nodes]


def _owned_parts(manifests: Layout, domains: Sequence[int]) -> dict[int, list[Shard]]:
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


def _num_bytes(parts: Sequence[Shard]) -> int:
    return sum(part.num_bytes for part in parts)


def parts_of(copies: Sequence[PeerCopy], owner: int) -> Manifest:
    """What is kept of worker `owner` elsewhere; empty where all it holds has replicas."""
    return next((copy.parts for copy in copies if copy.owner == owner), ())


def kept_by(copies: Sequence[PeerCopy], keeper: int) -> Mapping[int, Manifest]:
    """Owner -> the parts of it that worker `keeper` keeps."""
    return {copy.owner: copy.parts for copy in copies if copy.keeper == keeper}
