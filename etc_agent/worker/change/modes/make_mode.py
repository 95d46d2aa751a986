"""From the choice of a mode to its migration plan, and to the mode's object on this worker."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import torch
import torch.distributed as dist

from etc_agent.adapters.choose import adapter_of
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory.shared import shared_memory_for
from etc_agent.migration.modes import Choice
from etc_agent.migration.own_plan import Change, OwnPlan, plan_to_keep, plan_to_release
from etc_agent.migration.release import ReleasingMigration
from etc_agent.migration.transport.wire import Wire
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.layout import Manifest, Shard
from etc_agent.worker.change.modes.keeping import Keeping, allocate
from etc_agent.worker.change.modes.mode import Mode
from etc_agent.worker.change.modes.releasing import Releasing
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.settings import Settings


def plan_for(choice: Choice, wire: Wire, change: Change, timeout: datetime.timedelta) -> OwnPlan:
    """This worker's part of the plan. Collective; raises as `own_plan.plan_to_keep` does."""
    if choice.mode == "release":
        return plan_to_release(wire, change, choice.budget_bytes, timeout)
    # Forwarding relieves network ports; on a single host there is nothing to relieve.
    return plan_to_keep(wire, change, timeout, forwarding=len(set(change.nodes or ())) > 1)


def make_mode(
    choice: Choice,
    plan: MigrationPlan,
    worker: int,
    group: dist.ProcessGroup,
    sources: Mapping[Shard, torch.Tensor],
    manifest: Manifest,
    following: LiveGeneration | None,
    settings: Settings,
) -> Mode:
    """The chosen mode's object for this worker.

    Args:
        sources: the old tensors, including the buffer of the random stream.
        manifest: what the worker will hold, including streams. In `keep` mode this call allocates `following`, the new
            generation.

    Raises:
        EtcError: a tensor does not match the plan.
    """
    timeout_s, verify = settings.switch_timeout_s, settings.dump_dir is not None
    if choice.mode == "release":
        releasing = ReleasingMigration(
            plan, worker, sources, group,
            timeout_s=timeout_s, device=settings.device, budget_bytes=choice.budget_bytes, verify=verify,
        )
        return Releasing(releasing, following)
    gives_memory = following is not None and adapter_of(following.state).gives_memory
    memory = None if gives_memory else shared_memory_for(plan, worker, settings.device)
    new = None
    targets: dict[Shard, torch.Tensor] = {}
    if following is not None:
        new = allocate(following, plan, worker, sources, memory, settings.device)
        targets = dict(new.boxes)
        shared = memory.tensors if memory is not None else {}
        for shard in manifest:
            if shard not in targets:  # a random stream, which is not a tensor of the model
                targets[shard] = shared.get(shard, torch.zeros(shard.box.shape, dtype=torch.uint8, device="cpu"))
    keeping = KeepingMigration(
        plan, worker, sources, targets, group, timeout_s=timeout_s, memory=memory, verify=verify
    )
    return Keeping(keeping, new)
