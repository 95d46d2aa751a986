"""Migration for anyone who holds two layouts: no agent, no etcd, no training session."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from etc_agent.migration.check import check_dtypes, check_tensors
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory.shared import shared_memory_for
from etc_agent.migration.own_plan import Change, Described, plan_to_keep, plan_to_release
from etc_agent.migration.progress import ProgressBar
from etc_agent.migration.protocol import Migration
from etc_agent.migration.release import ReleasingMigration
from etc_agent.migration.transport.alike import gather_alike
from etc_agent.migration.transport.wire import Wire
from etc_agent.planner.transfers.classes import encode_class
from etc_agent.state.layout import Manifest, Shard
from etc_agent.torch_private.backends import backend_of


def migrate(
    have: Mapping[Shard, torch.Tensor],
    need: Iterable[Shard],
    group: Any = None,
    *,
    mode: Literal["keep", "release"] = "keep",
    device: torch.device | str = "cpu",
    budget_bytes: int | None = None,
    timeout_s: float = 300.0,
    verify: bool = False,
) -> dict[Shard, torch.Tensor]:
    """Bring every rank of a process group the shards it needs, from the ranks that have them.

    Collective. The ranks that have and those that need may be the same, overlap, or be disjoint (trainers and
    inference servers): pass an empty mapping, or nothing needed, where that is so.

    Args:
        have: this rank's tensors by shard. With mode ``release`` their memory is released.
        need: the shards wanted on this rank.
        group: a `ProcessGroup`, or a raw c10d backend; by default the default group.
        mode: ``keep`` leaves `have` as it is; ``release`` takes its memory away as the new tensors come.
        device: where the new tensors go.
        budget_bytes: with ``release``, most bytes of old and new tensors and buffers at once on this rank.
        timeout_s: longest time without progress.
        verify: hash every box where it leaves and where it arrives.

    Returns:
        The needed shards, contiguous. A shard that this rank has already is the very tensor it passed.

    Raises:
        PlanError: the shards of the ranks contradict each other, or a needed box is on no rank.
        MigrationError: a tensor is unlike its shard, ranks ask for different modes, a rank was lost, or the budget is
            too small.
    """
    if mode not in ("keep", "release"):
        raise ValueError(f"mode must be 'keep' or 'release', not {mode!r}")
    if budget_bytes is not None and budget_bytes < 1:
        raise ValueError(f"budget_bytes must be at least 1, or None for the default, not {budget_bytes}")
    device = torch.device(device)
    backend = _backend_of(dist.group.WORLD if group is None else group, device)
    rank = int(backend.rank())
    needed = tuple(dict.fromkeys(need))
    asked = {"mode": mode, "verify": verify}
    wire, timeout = Wire(backend), datetime.timedelta(seconds=timeout_s)
    change = _exchange(wire, have, needed, asked, timeout)
    if mode == "release":
        own = plan_to_release(wire, change, budget_bytes, timeout)
        releasing = ReleasingMigration(
            own.plan, rank, have, backend,
            timeout_s=timeout_s, device=device, budget_bytes=budget_bytes, verify=verify,
        )
        return _run(releasing, rank, needed, device)
    plan = plan_to_keep(wire, change, timeout, forwarding=False).plan
    memory = shared_memory_for(plan, rank, device)
    targets = {} if memory is None else dict(memory.tensors)
    for shard in needed:
        if shard in have:
            targets[shard] = have[shard]
        elif shard not in targets:
            targets[shard] = _empty(shard, device)
    keeping = KeepingMigration(plan, rank, have, targets, backend, timeout_s=timeout_s, memory=memory, verify=verify)
    return _run(keeping, rank, needed, device)


def _run(migration: Migration, rank: int, needed: Manifest, device: torch.device) -> dict[Shard, torch.Tensor]:
    try:
        migration.prepare()
        if rank == 0:
            with ProgressBar() as bar:
                migration.run(bar)
        else:
            migration.run()
    finally:
        # Otherwise the error would keep the connections open, and peers would wait for them until their timeout.
        migration.close()
    found = migration.targets
    return {shard: found[shard] if shard in found else _empty(shard, device) for shard in needed}


def _exchange(
    wire: Wire,
    have: Mapping[Shard, torch.Tensor],
    need: Manifest,
    asked: Mapping[str, Any],
    timeout: datetime.timedelta,
) -> Change:
    """The manifests of all ranks, over the group.

    Args:
        asked: what all ranks have to ask for alike.

    Raises:
        MigrationError: a rank did not call, brings what it cannot send, or asks for something else; the same on all.
    """
    complaint = _complaint(wire.rank, have, need)
    request = json.dumps([asked, complaint]).encode()
    held = tuple(have)
    alike = [0] * wire.size
    try:
        requests = gather_alike(wire, request, alike, timeout)
        previous, current = (gather_alike(wire, encode_class(each), alike, timeout) for each in (held, need))
    except RuntimeError as error:
        raise MigrationError(f"rank {wire.rank}: not every rank called migrate(): {error}") from error
    said = [json.loads(requests.values[number]) for number in requests.class_of]
    for rank, (request_of, complaint_of) in enumerate(said):
        if complaint_of:
            raise MigrationError(complaint_of)
        if request_of != said[0][0]:
            raise MigrationError(f"every rank must ask migrate() for the same: rank 0 asks for {said[0][0]}, "
                                 f"rank {rank} for {request_of}")
    before, after = (Described(each.values, each.class_of) for each in (previous, current))
    return Change(before, after, held, need, None)


def _complaint(rank: int, have: Mapping[Shard, torch.Tensor], need: Iterable[Shard]) -> str | None:
    """Why this rank cannot take part, or None."""
    try:
        check_tensors(rank, "old", (), have)
        check_dtypes(rank, need)
    except MigrationError as error:
        return str(error)
    return None


def _backend_of(group: Any, device: torch.device) -> Any:
    """The raw backend of a `ProcessGroup` for a device type; without NCCL, gloo moves GPU tensors too."""
    if group is None:
        raise MigrationError("no process group: call torch.distributed.init_process_group first, or pass a group")
    if not isinstance(group, dist.ProcessGroup):
        return group
    try:
        return backend_of(group, device)
    except RuntimeError:
        return backend_of(group, torch.device("cpu"))


def _empty(shard: Shard, device: torch.device) -> torch.Tensor:
    return torch.empty(shard.box.shape, dtype=getattr(torch, shard.tensor.dtype), device=device)
