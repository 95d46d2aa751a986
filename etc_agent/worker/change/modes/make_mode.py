"""From the choice of a mode to its migration plan, and to the mode's object on this worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory.shared import shared_memory_for
from etc_agent.migration.modes import Choice
from etc_agent.migration.release import ReleasingMigration
from etc_agent.migration.release_plan import plan_release
from etc_agent.planner.migration import make_plan
from etc_agent.planner.plan import MigrationPlan
from etc_agent.state.layout import Manifest, Shard
from etc_agent.worker.change.modes.keeping import Keeping, allocate
from etc_agent.worker.change.modes.mode import Mode
from etc_agent.worker.change.modes.releasing import Releasing
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.settings import Settings


def make_plan_for(
    choice: Choice, old: Sequence[Manifest], new: Sequence[Manifest], nodes: Sequence[int]
) -> MigrationPlan:
    """The plan from the manifests `old` to `new`, by worker; `nodes`: worker -> number of its node."""
    if choice.mode == "release":
        return plan_release(old, new, choice.budget_bytes, nodes)
    # Forwarding relieves network ports; on a single host there is nothing to relieve.
    return make_plan(old, new, nodes=nodes, forwarding=len(set(nodes)) > 1)


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
    memory = shared_memory_for(plan, worker, settings.device)
    new = None
    targets: dict[Shard, torch.Tensor] = {}
    if following is not None:
        new = allocate(following, manifest, plan, worker, sources, memory, settings.device)
        targets = new.local()
        shared = memory.tensors if memory is not None else {}
        for shard in manifest:
            if shard not in targets:  # a random stream, which is not a tensor of the model
                targets[shard] = shared.get(shard, torch.zeros(shard.box.shape, dtype=torch.uint8, device="cpu"))
    keeping = KeepingMigration(
        plan, worker, sources, targets, group, timeout_s=timeout_s, memory=memory, verify=verify
    )
    return Keeping(keeping, new)
