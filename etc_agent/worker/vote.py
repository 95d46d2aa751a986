"""The one small collective of a step: the MIN of sixteen bytes over all ranks, in a tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.stores import raw_group

_TAG = 3
_BRANCHES = 8
"""As many ranks as a node mostly has."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """One rank's vote, or the result over all ranks: `ok` on every rank, the smallest `armed` generation, and the
    smallest that a rank says of copies (`redundancy.copier`) and of checkpoints (`checkpoints.saver.Bid`)."""

    ok: bool
    armed: int
    copies: int = 0
    checkpoint: int = 0


class Vote:
    """The votes of one generation, over a CPU gloo group of its own, whose connections are noted in `connections`."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout_s: float, connections: Connections
    ) -> None:
        self.group = raw_group(store, rank, size, timeout_s, connections)

    def cast(self, ballot: Ballot) -> Ballot:
        """Vote, and return the result, which is equal on every rank.

        Raises:
            RuntimeError: a rank was lost, or did not vote in time.
        """
        return minimum(self.group, ballot)


def minimum(group: dist.ProcessGroup, ballot: Ballot) -> Ballot:
    """MIN over all ranks' ballots, over a raw group: up a tree to rank 0, and down again.

    No rank has the result before every rank has voted. A rank that is lost in between leaves some ranks with the
    result and others with an error, as any collective does.

    Raises:
        RuntimeError: a rank was lost, or did not vote in time.
    """
    parent, children = place_in_tree(group.rank(), group.size())
    said = torch.tensor([ballot.ok, ballot.armed, ballot.copies, ballot.checkpoint], dtype=torch.int32, device="cpu")
    theirs = [torch.empty_like(said) for _ in children]
    for work in [group.recv([each], child, _TAG) for child, each in zip(children, theirs, strict=True)]:
        work.wait()
    for each in theirs:
        torch.minimum(said, each, out=said)
    result = said
    if parent is not None:
        result = torch.empty_like(said)
        heard = group.recv([result], parent, _TAG)
        group.send([said], parent, _TAG).wait()
        heard.wait()
    for work in [group.send([result], child, _TAG) for child in children]:
        work.wait()
    ok, armed, copies, checkpoint = result.tolist()
    return Ballot(bool(ok), armed, copies, checkpoint)


def place_in_tree(rank: int, size: int) -> tuple[int | None, tuple[int, ...]]:
    """The parent of a rank, and its children: at most `_BRANCHES` - 1 on each of log(size) levels.

    The ranks 0 .. 7 are one branch, the ranks 8 .. 15 the next: ranks of one node, which mostly have consecutive
    numbers, meet first.
    """
    children: list[int] = []
    span = 1
    while span < size:
        if rank // span % _BRANCHES:
            return rank - rank // span % _BRANCHES * span, tuple(children)
        children += [rank + branch * span for branch in range(1, _BRANCHES) if rank + branch * span < size]
        span *= _BRANCHES
    return None, tuple(children)
