"""The one small collective of a step: a sixteen-byte MIN all-reduce over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.stores import raw_group


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
    """MIN over all ranks' ballots, over a raw group."""
    said = [ballot.ok, ballot.armed, ballot.copies, ballot.checkpoint]
    values = torch.tensor(said, dtype=torch.int32, device="cpu")
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    group.allreduce([values], options).wait()
    ok, armed, copies, checkpoint = values.tolist()
    return Ballot(bool(ok), armed, copies, checkpoint)
