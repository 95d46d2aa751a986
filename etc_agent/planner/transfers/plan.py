"""The migration plan: what every worker keeps, sends and receives, in rounds.

Workers are numbered 0 .. n-1 here: the members of the previous generation in the order of their virtual ranks, then
those who join. A worker with an empty previous manifest joins; one with an empty current manifest leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor


@dataclass(frozen=True, slots=True)
class Refer:
    """`worker` already holds `box`: as the whole of the new shard (shared storage) or as a part of it (local copy).

    `source_box` and `target_box` are the old and the new shard around it.
    """

    worker: int
    tensor: LogicalTensor
    box: Box
    source_box: Box
    target_box: Box

    @property
    def is_whole(self) -> bool:
        """The new shard is exactly an old one, so that its storage can be kept."""
        return self.box == self.source_box == self.target_box


@dataclass(frozen=True, slots=True)
class Transfer:
    """`source` sends `box` out of its old shard `source_box`; `target` receives it into its new shard `target_box`.

    `forwarded`: `source_box` is a new shard of the source instead, into which an earlier round has brought `box`.
    """

    source: int
    target: int
    tensor: LogicalTensor
    box: Box
    source_box: Box
    target_box: Box
    forwarded: bool = False

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.tensor.itemsize


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """A complete plan. The same on every worker: `digest` says so.

    `rounds` are executed in order; the transfers of one round are in flight together and, between one pair of
    workers, posted in the order listed.
    """

    num_workers: int
    refers: tuple[Refer, ...]
    rounds: tuple[tuple[Transfer, ...], ...]
    digest: str

    @property
    def moved_bytes(self) -> int:
        return sum(transfer.num_bytes for transfers in self.rounds for transfer in transfers)
