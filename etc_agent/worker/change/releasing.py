"""A switch in `release` mode: the old state goes as the new one comes, so there is no way back once it has begun."""

from __future__ import annotations

import torch

from etc_agent.errors import EtcError
from etc_agent.integrations.native import materialise, shards_of
from etc_agent.migration.memory.binding import same_memory
from etc_agent.migration.memory.bits import as_bits, copy_bits
from etc_agent.migration.release import ReleasingMigration
from etc_agent.state.layout import Shard
from etc_agent.worker.change.prepare import PreparedGeneration
from etc_agent.worker.world.swap import entered


class StateLostError(EtcError):
    """A switch in `release` mode failed after it had begun: neither generation's state is whole."""


def take_over(prepared: PreparedGeneration) -> None:
    """Give the tensors that have come to the new generation, whose model is on the meta device until then."""
    following = prepared.next
    if following is None:
        return
    targets = prepared.migration.targets

    def provide(shard: Shard, meta: torch.Tensor) -> torch.Tensor:
        # Nobody sends an empty shard.
        return targets[shard] if shard in targets else torch.empty_like(meta, device=following.parallel.device)

    with entered(following.world):
        materialise(following.state, provide)
        for shard, tensor in shards_of(following.state).items():
            # The optimizer makes some scalars on the host at once, not on the meta device.
            if shard in targets and not same_memory(tensor, targets[shard]):
                copy_bits((as_bits(tensor),), (as_bits(targets[shard]),))
    if prepared.new_stream is not None:
        shard, _ = prepared.new_stream
        prepared.new_stream = (shard, targets[shard].cpu())


def what_is_lost(prepared: PreparedGeneration) -> str:
    """What this worker has given up and what it still holds; "" where nothing was, as in `keep` mode."""
    migration = prepared.migration
    if not isinstance(migration, ReleasingMigration):
        return ""
    account = migration.account()
    return f"; release mode had begun: {account}; the state has to come from a checkpoint" if account else ""
