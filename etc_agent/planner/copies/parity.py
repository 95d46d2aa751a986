"""Parity: a group of workers on n nodes keeps 1 / (n - 1) of what copies would take, as RAID 5 does over n disks.

    group of 3       keeps
    a: a0 a1         b1 ^ c0      the own parts of each member are cut into n - 1 pieces, one for each other member
    b: b0 b1         c1 ^ a0
    c: c0 c1         a1 ^ b0      c is lost: a has c0 = (b1 ^ c0) ^ b1, b has c1 = (c1 ^ a0) ^ a0

Groups follow from the placement alone, so that whoever knows it, with or without random streams and late optimizer
state, finds the same workers in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from etc_agent.control.redundancy import Scheme
from etc_agent.planner.copies.keepers import Block, Piece, domains_of, num_bytes, owned_parts, peer_blocks
from etc_agent.state.algebra import flat_range
from etc_agent.state.layout import Layout, Manifest, Shard

MOST_MEMBERS: Final = 8
"""Of a group: more would save little memory (1/7 of a copy at 8), and two nodes of one group cannot be lost at once."""


@dataclass(frozen=True, slots=True)
class Group:
    """`members`: workers of as many failure domains, at least two. `owners`: those whose state this group protects; a
    domain with fewer workers than others has members that only keep."""

    members: tuple[int, ...]
    owners: tuple[int, ...]


def parity_groups(domains: Sequence[int]) -> tuple[Group, ...]:
    """Groups over all workers, each the owner of one; empty where there is one domain. `domains`: worker -> its failure
    domain, numbered from 0."""
    workers: dict[int, list[int]] = {}
    for worker, domain in enumerate(domains):
        workers.setdefault(domain, []).append(worker)
    if len(workers) < 2:
        return ()
    num_sets = -(-len(workers) // MOST_MEMBERS)
    ends = [number * len(workers) // num_sets for number in range(num_sets + 1)]
    found = []
    for start, end in pairwise(ends):
        chosen = [workers[domain] for domain in range(start, end)]
        for lane in range(max(map(len, chosen))):
            members = tuple(theirs[lane % len(theirs)] for theirs in chosen)
            found.append(Group(members, tuple(theirs[lane] for theirs in chosen if lane < len(theirs))))
    return tuple(found)


def parity_blocks(manifests: Layout, nodes: Sequence[int]) -> tuple[Block, ...]:
    """The blocks that let the job lose any one failure domain; arguments as for `peer_blocks`."""
    domains = domains_of(nodes)
    parts = owned_parts(manifests, domains)
    found = []
    for group in parity_groups(domains):
        num_others = len(group.members) - 1
        pieces: dict[int, list[Piece]] = {keeper: [] for keeper in group.members}
        for at, owner in enumerate(group.members):
            if owner in group.owners:
                for number, piece in enumerate(cut_evenly(parts.get(owner, ()), num_others)):
                    if piece:
                        keeper = group.members[(at + 1 + number) % (num_others + 1)]
                        pieces[keeper].append(Piece(owner, piece))
        found += [Block(keeper, tuple(theirs)) for keeper, theirs in pieces.items() if theirs]
    return tuple(found)


def cut_evenly(parts: Sequence[Shard], num_pieces: int) -> list[Manifest]:
    """`parts` one after the other, in `num_pieces` pieces of equal bytes, to one element."""
    total = num_bytes(parts)
    pieces: list[list[Shard]] = [[] for _ in range(num_pieces)]
    done = 0
    for part in parts:
        itemsize, size = part.tensor.itemsize, part.box.num_elements
        start = 0
        while start < size:
            piece = done * num_pieces // total
            left = -(-(piece + 1) * total // num_pieces) - done
            end = min(size, start - (-left // itemsize))
            pieces[piece] += [Shard(part.tensor, box) for box in flat_range(part.box, start, end)]
            done += (end - start) * itemsize
            start = end
    return [tuple(piece) for piece in pieces]


_BLOCKS: Final[Mapping[Scheme, Callable[[Layout, Sequence[int]], tuple[Block, ...]]]] = {
    Scheme.NONE: lambda manifests, nodes: (),
    Scheme.PEER: peer_blocks,
    Scheme.PARITY: parity_blocks,
}


def blocks_of(scheme: Scheme, manifests: Layout, nodes: Sequence[int]) -> tuple[Block, ...]:
    """Who keeps what under `scheme`; arguments as for `peer_blocks`."""
    return _BLOCKS[scheme](manifests, nodes)
