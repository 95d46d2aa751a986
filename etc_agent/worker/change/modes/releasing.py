"""The `release` mode of a switch: old tensors are freed as new ones arrive, so once begun it cannot be undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from etc_agent.adapters.choose import adapter_of
from etc_agent.integrations.tensors import Placed
from etc_agent.migration.memory.binding import same_memory
from etc_agent.migration.memory.bits import as_bits, copy_bits
from etc_agent.migration.release import ReleasingMigration
from etc_agent.state.layout import Shard
from etc_agent.worker.change.errors import StateLostError, SwitchError
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.world.swap import entered

if TYPE_CHECKING:
    from etc_agent.worker.change.attempt import Attempt


class Releasing:
    """The mode `release`. `following`: the new generation, None on a worker that leaves; its model is on the meta
    device until `take_over`."""

    def __init__(self, migration: ReleasingMigration, following: LiveGeneration | None) -> None:
        self.migration = migration
        self._following = following

    def refresh(self, sources: Mapping[Shard, torch.Tensor]) -> frozenset[Shard]:
        return self.migration.refresh(sources)

    def begin(self, attempt: Attempt) -> bool:
        """A vote of all workers: no memory is released before every worker is known to be present and without a
        problem.
        """
        return attempt.vote_to_begin()

    def take_over(self) -> None:
        following = self._following
        if following is None:
            return
        targets = self.migration.targets

        def provide(placed: Placed, meta: torch.Tensor) -> torch.Tensor:
            # An empty shard is sent by nobody, so there is no target for it. Pieces are copied in below.
            if placed.is_one_box and placed.shard in targets:
                return targets[placed.shard]
            return torch.zeros_like(meta, device=following.parallel.device)

        adapter = adapter_of(following.state)
        with entered(following.world):
            adapter.materialise(following.state, provide)
            for shard, tensor in adapter.shards(following.state).items():
                # The optimizer creates some scalars on the host directly, not on the meta device.
                if shard in targets and not same_memory(tensor, targets[shard]):
                    copy_bits((as_bits(tensor),), (as_bits(targets[shard]),))

    def close(self) -> None:
        self.migration.close()
        self._following = None

    def account(self) -> str:
        account = self.migration.account()
        return f"; release mode had begun: {account}; the state has to come from a checkpoint" if account else ""

    def refused(self, generation: int, attempt: Attempt) -> None:
        reason = attempt.reason or "the migration failed on another worker"
        lost = self.account() or "; release mode had begun, and other workers have released state"
        kind = SwitchError if attempt.lost_connections else StateLostError
        raise kind(f"the switch to generation {generation} failed: {reason}{lost}")
