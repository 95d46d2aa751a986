"""Who sends a box to whom: a rule that every worker applies alone, with the same result at both ends.

A box is cut into chunks. A needer on a node with a holder gets its chunks from the holders there, in turn. The other
chunks are laid in one line and dealt to the nodes that hold the box, in turn, and on a node to its holders in turn. The
line goes on from tensor to tensor (*rotation*), so that small tensors are dealt evenly, too. Where holders are to send
unequal shares (`shares`), each gets a stretch of the line instead.

With forwarding a chunk enters each node without a holder once. These nodes form a forest: as many roots as there are
nodes with holders, each root served by another of them, and every node passes the chunk on to at most two. Inside a
node it is passed on in the same way. Each chunk rotates the order, so that no worker sends much more than one copy;
with one holder that is scatter-allgather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from etc_agent.planner.transfers.demands import Demand, Workers

CHUNK_BYTES = 1 << 20
"""Smaller boxes are not cut to balance the load: a further message would cost more than it saves."""
_PER_STRETCH = 8
"""Chunks for each holder where holders send unequal shares: so finely are these met."""
_MOST_ROTATIONS = 4
"""So many different rotations at most: what they balance is the sending of small tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Legs:
    """Transfers of the chunks of one box, one per entry of the arrays. `depth`: how often the chunk has been forwarded
    before; a leg whose `depth` is not 0 comes from a new shard of its source."""

    source: Workers
    target: Workers
    chunk: Workers
    depth: Workers


class Routes:
    """The legs of one demand. `node_of`: worker -> node, (workers,).

    Attributes:
        num_sent: how often the box leaves its holders for other nodes.
        depth: of the deepest leg.
        period: rotations are counted modulo this.
    """

    def __init__(self, demand: Demand, node_of: Workers, *, forwarding: bool) -> None:
        holders = _by_node(demand.holders, node_of)
        needers = _by_node(demand.needers, node_of)
        near = [node for node in needers if node in holders]
        self._near = tuple(_Table([of[node] for node in near]) for of in (needers, holders)) if near else ()
        self._holders = _Table(list(holders.values()))
        self._stretches: _Stretches | None = None
        remote = [workers for node, workers in needers.items() if node not in holders]
        self._far = np.sort(np.concatenate(remote)) if remote and not forwarding else np.empty(0, dtype=np.int64)
        self._remote = _Table(remote) if remote and forwarding else None
        self._forest = _Forest(len(holders), len(remote)) if self._remote is not None else None
        self._num_ways = len(demand.holders) + (len(demand.needers) - 1 if forwarding else 0)
        self.num_sent = min(len(holders), len(remote)) if forwarding else len(self._far)
        self.depth = 0
        sizes = [len(holders), *map(len, (*holders.values(), *needers.values()))]
        if self._remote is not None and self._forest is not None:
            self.depth = int(self._forest.depth.max() + _DEPTH_IN_NODE[int(self._remote.sizes.max()) - 1])
            sizes.append(len(remote))
        self.period = min(len(holders) * lcm(*sizes), _MOST_ROTATIONS)

    def divide(self, workers: Workers, share: Workers) -> None:
        """Let the holders, `workers`, send unequal shares to other nodes. `share`: in any unit, (workers,)."""
        if share.any():
            self._stretches = _Stretches(workers, share)

    def num_chunks(self, size_bytes: int) -> int:
        """Into how many chunks a box of this size is cut, so that all who can send take part."""
        ways = max(1, self._num_ways) * (_PER_STRETCH if self._stretches is not None else 1)
        return -(-size_bytes // max(CHUNK_BYTES, -(-size_bytes // ways)))

    def legs(self, num_chunks: int, rotation: int) -> Legs:
        """All legs, for a box that is cut into `num_chunks`."""
        parts = list(self._parts(num_chunks, rotation))
        if len(parts) == 1:
            return parts[0]
        return Legs(*(np.concatenate([getattr(part, name) for part in parts]) for name in Legs.__slots__))

    def _parts(self, num_chunks: int, rotation: int) -> Iterator[Legs]:
        if self._near:
            needers, holders = self._near
            yield self._on_nodes(needers, holders, num_chunks, rotation)
        if len(self._far):
            line, chunk, target = _line(num_chunks, self._far, rotation)
            place = np.arange(len(line))
            stretches = self._stretches
            source = self._holders.deal(line) if stretches is None else stretches.at(place, len(line))
            yield Legs(source, target, chunk, np.zeros_like(chunk))
        if self._remote is not None and self._forest is not None:
            yield self._forwarded(self._remote, self._forest, num_chunks, rotation)

    def _on_nodes(self, needers: _Table, holders: _Table, num_chunks: int, rotation: int) -> Legs:
        """Arrays of (chunks, nodes, members of a node) here; the members are padded to the largest node."""
        sizes, member = needers.sizes[:, None], np.arange(needers.rows.shape[1])
        chunk, target, exists = needers.for_each(num_chunks)
        line = (chunk + rotation * num_chunks) * sizes + member
        source = holders.rows[np.arange(len(sizes))[:, None], line % holders.sizes[:, None]]
        return Legs(source[exists], target[exists], chunk[exists], np.zeros(int(exists.sum()), dtype=np.int64))

    def _forwarded(self, remote: _Table, forest: _Forest, num_chunks: int, rotation: int) -> Legs:
        """Arrays of (chunks, nodes, members of a node) here; the members are padded to the largest node."""
        turn = np.arange(num_chunks)[:, None] + rotation * num_chunks
        nodes = np.arange(len(remote.sizes))
        first = remote.rows[nodes, turn % remote.sizes]
        position = (nodes - turn) % len(nodes)
        root = position < forest.num_roots
        parent = np.take_along_axis(first, (forest.parent[position] + turn) % len(nodes), axis=1)
        at_root = np.where(root, position, 0)
        if self._stretches is None:
            holder = self._holders.at((at_root + turn) % len(self._holders.sizes), turn // len(self._holders.sizes))
        else:
            place = np.arange(num_chunks)[:, None] * forest.num_roots + at_root
            holder = self._stretches.at(place, num_chunks * forest.num_roots)
        into_node = np.where(root, holder, parent)
        member = np.arange(remote.rows.shape[1])
        place = (member - turn[:, :, None]) % remote.sizes[:, None]
        before = (np.maximum(place - 1, 0) // 2 + turn[:, :, None]) % remote.sizes[:, None]
        inside = np.take_along_axis(np.broadcast_to(remote.rows, place.shape), before, axis=2)
        source = np.where(place == 0, into_node[:, :, None], inside)
        depth = forest.depth[position][:, :, None] + _DEPTH_IN_NODE[place]
        chunk, target, exists = remote.for_each(num_chunks)
        return Legs(source[exists], target[exists], chunk[exists], depth[exists])


class _Table:
    """Workers by node, as rows padded to equal length."""

    def __init__(self, groups: Sequence[Workers]) -> None:
        self.sizes = np.array([len(group) for group in groups], dtype=np.int64)
        self.rows = np.zeros((len(groups), int(self.sizes.max())), dtype=np.int64)
        for row, group in zip(self.rows, groups, strict=True):
            row[: len(group)] = group

    def for_each(self, num_chunks: int) -> tuple[Workers, Workers, NDArray[np.bool_]]:
        """Chunk, worker, and whether there is one: (chunks, nodes, members of a node)."""
        shape = (num_chunks, *self.rows.shape)
        exists = np.arange(shape[2]) < self.sizes[:, None]
        chunk = np.arange(num_chunks)[:, None, None]
        return np.broadcast_to(chunk, shape), np.broadcast_to(self.rows, shape), np.broadcast_to(exists, shape)

    def deal(self, line: Workers) -> Workers:
        """A worker for each place of a line: the nodes in turn, and on each node its workers in turn."""
        return self.at(line % len(self.sizes), line // len(self.sizes))

    def at(self, node: Workers, turn: Workers) -> Workers:
        found: Workers = self.rows[node, turn % self.sizes[node]]
        return found


class _Stretches:
    """Workers that each get a stretch of a line, in proportion to their shares."""

    def __init__(self, workers: Workers, share: Workers) -> None:
        self._workers, self._ends = workers, np.cumsum(share)

    def at(self, place: Workers, length: int) -> Workers:
        """The worker at each place of a line of this length."""
        middle = (2 * place + 1) * self._ends[-1] // (2 * length)
        found: Workers = self._workers[np.searchsorted(self._ends, middle, side="right")]
        return found


class _Forest:
    """Positions 0 .. `num_nodes` - 1: roots first, then two children for each position in order, the second of which is
    served a round later."""

    def __init__(self, num_roots: int, num_nodes: int) -> None:
        self.num_roots = min(num_roots, num_nodes)
        self.parent = np.maximum(np.arange(num_nodes) - self.num_roots, 0) // 2
        self.depth = np.zeros(num_nodes, dtype=np.int64)
        for position in range(self.num_roots, num_nodes):
            self.depth[position] = self.depth[self.parent[position]] + 1 + (position - self.num_roots) % 2


_DEPTH_IN_NODE = np.array([(place + 1).bit_length() - 1 for place in range(1 << 12)], dtype=np.int64)
"""Place of a worker in the order of its node -> how often a chunk is forwarded on the node before it arrives there."""


def _line(num_chunks: int, needers: Workers, rotation: int) -> tuple[Workers, Workers, Workers]:
    """The places of all chunks for all needers on one line, and the chunk and the needer at each."""
    length = num_chunks * len(needers)
    place = np.arange(length)
    return place + rotation * length, place // len(needers), needers[place % len(needers)]


def _by_node(workers: Workers, node_of: NDArray[np.int64]) -> dict[int, Workers]:
    nodes = node_of[workers]
    order = np.argsort(nodes, kind="stable")
    found, starts = np.unique(nodes[order], return_index=True)
    return dict(zip(map(int, found), np.split(workers[order], starts[1:]), strict=True))
