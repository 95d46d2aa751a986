"""`release` mode: old and new state do not fit in memory together, so tensors are allocated and freed round by
round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from etc_agent.migration.check import check_tensors, describe, needed_shards
from etc_agent.migration.engine import Party, Run
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory.lifetimes import default_budget_bytes, lifetimes_of
from etc_agent.migration.memory.memory_file import can_share
from etc_agent.migration.memory.rebinding import OldPlaces
from etc_agent.migration.memory.storage import OnDemand
from etc_agent.migration.protocol import Progress
from etc_agent.migration.release_memory import ReleasingMemory
from etc_agent.migration.report import MigrationReport
from etc_agent.migration.transport.landing import Landing, share_landing
from etc_agent.planner.transfers.plan import MigrationPlan, Refer, Transfer
from etc_agent.state.algebra import subtract_all
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Shard

_NAMED = 5
"""How many shards a message names; of further ones it gives the number."""

_LEEWAY = 16
"""Without an explicit budget, staging may exceed it by this part of the headroom above the larger state; otherwise two
tensors of equal size, whose smallest rounds take all of the headroom, could not change places."""


class ReleasingMigration:
    """One worker's part of a plan in `release` mode (`protocol.Migration`).

    A new tensor is allocated when its first bytes are about to arrive; the storage of an old one is emptied when its
    last bytes have been sent, whoever else refers to it. A failure loses the tensors under way: `remaining` returns
    what is left.

    Args:
        sources: the old local tensors by shard, released by the caller.
        device: where new tensors go.
        budget_bytes: most bytes of old state, new state and staging at once; by default `default_budget_bytes`.
        plan, worker, group, timeout_s, verify: as for `KeepingMigration`.

    Attributes:
        peak_bytes: most bytes that will be held at once, known after `prepare`.
        budget_bytes: what they may be.

    Raises:
        MigrationError: a tensor is not what the plan says of it. That the budget is too small, `prepare` says.
    """

    def __init__(
        self,
        plan: MigrationPlan,
        worker: int,
        sources: Mapping[Shard, torch.Tensor],
        group: Any,
        *,
        timeout_s: float,
        device: torch.device | str = "cpu",
        budget_bytes: int | None = None,
        verify: bool = False,
    ) -> None:
        self._old_shards, new_shards = needed_shards(plan, worker)
        check_tensors(worker, "old", self._old_shards, sources)
        self._party = Party(plan, worker, group, timeout_s, torch.device(device), verify=verify)
        self._lifetimes = lifetimes_of(self._party.schedule, sources)
        self._tensors = self._on_demand(sources)
        self._all_sources = tuple(sources)
        self._landing = Landing()
        self._memory: ReleasingMemory | None = None
        self._has_begun = False
        new_bytes = sum(shard.num_bytes for shard in new_shards)
        sizes = [shard.num_bytes for shard in (*sources, *new_shards)]
        self.budget_bytes = budget_bytes or default_budget_bytes(self._tensors.old_bytes, new_bytes, sizes)
        headroom_bytes = self.budget_bytes - max(self._tensors.old_bytes, new_bytes)
        self._leeway_bytes = 0 if budget_bytes else headroom_bytes // _LEEWAY
        self.peak_bytes = 0

    @property
    def staging_bytes(self) -> int:
        return (self._memory.staging.num_bytes if self._memory else 0) + self._landing.my_area.num_bytes

    @property
    def targets(self) -> dict[Shard, torch.Tensor]:
        return self._tensors.targets

    def prepare(self) -> None:
        """Check the budget, agree on the plan with every other worker, make the connections, touch buffers.

        Raises:
            MigrationError: the budget of a worker is too small; a worker has another plan, cannot take part, or does
                not answer in time.
        """
        party = self._party
        on_host = party.device.type == party.wire.device.type == "cpu"
        self._landing = share_landing(party.plan, party.worker, party.peers, wanted=on_host and can_share())
        party.share(self._landing.neighbours)
        self._allocate()
        complaint = self._complaint()
        if complaint is not None:
            self._memory = None
        party.peers.agree(complaint, None)
        party.peers.meet(party.schedule)
        # Memory that the run will hold at its peak in any case can be allocated now.
        self._tensors.touch_ahead(self.peak_bytes - self.staging_bytes - self._tensors.old_bytes)
        self._hold_to_peak()

    def refresh(self, sources: Mapping[Shard, torch.Tensor]) -> frozenset[Shard]:
        """Take the old tensors as they are now, before `run`.

        Raises:
            MigrationError: a tensor is not what the plan says of it, or the budget is too small for their storages.
        """
        rebound = self._old_places.rebound(sources)
        if rebound:
            check_tensors(self._party.worker, "old", self._old_shards, sources)
            self._lifetimes = lifetimes_of(self._party.schedule, sources)
            self._tensors = self._on_demand(sources)
            self._all_sources = tuple(sources)
            if self._memory is not None:
                self._allocate()
                if (complaint := self._complaint()) is not None:
                    raise MigrationError(complaint)
                self._hold_to_peak()
        return rebound

    def run(self, progress: Progress | None = None) -> MigrationReport:
        """Move everything, once.

        Raises:
            MigrationError: a peer was lost or too slow, and old tensors have gone by then; or this has run already.
        """
        worker, memory = self._party.worker, self._memory
        if self._has_begun:
            raise MigrationError(f"worker {worker}: in release mode a migration runs once; plan again from remaining()")
        if memory is None:
            raise MigrationError(f"worker {worker}: run() needs prepare() on every worker first")
        self._has_begun = True
        # On the caller's stream: new tensors must come from the memory that training allocates from.
        run = Run(self._party, memory, progress)
        self._tensors.note()
        if self._lifetimes.local:
            with run.span("local copies"):
                memory.copy_what_stays()
        run.rounds()
        self._tensors.note()
        return run.report(tuple(self._tensors.timeline))

    def close(self) -> None:
        self._party.close()

    def remaining(self) -> dict[Shard, torch.Tensor]:
        """What this worker holds of the state at any point, also after a failed run: old shards that are still there,
        and the boxes of new ones that have arrived. No two overlap, so this is a manifest from which to plan again."""
        sources, memory = self._tensors.sources, self._memory
        if memory is None:
            return dict(sources)
        gone: dict[Shard, list[Box]] = defaultdict(list)
        for refer in memory.copied:
            if refer in memory.carried:
                gone[Shard(refer.tensor, refer.source_box)].append(refer.box)
        held = {}
        for shard, tensor in sources.items():
            if shard not in gone:
                held[shard] = tensor
            else:
                rest = subtract_all(shard.box, gone[shard])
                held |= {Shard(shard.tensor, box): tensor[box.within(shard.box)] for box in rest}
        for refer in memory.copied:
            if refer in memory.carried or Shard(refer.tensor, refer.source_box) not in sources:
                held[Shard(refer.tensor, refer.box)] = self._part(refer)
        for transfer in memory.arrived:
            held[Shard(transfer.tensor, transfer.box)] = self._part(transfer)
        return held

    def account(self) -> str:
        """What a failed run has released on this worker, for people; "" if nothing."""
        held = self._tensors.sources
        gone = [describe(shard.tensor, shard.box) for shard in self._all_sources if shard not in held]
        if not gone:
            return ""
        left = sum(shard.num_bytes for shard in self.remaining())
        named = ", ".join(gone[:_NAMED]) + (f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else "")
        return f"worker {self._party.worker} holds {left:,} bytes of state and has released its shards of {named}"

    def _on_demand(self, sources: Mapping[Shard, torch.Tensor]) -> OnDemand:
        tensors = OnDemand(self._party.worker, sources, self._party.device)
        tensors.keep_whole(self._party.schedule.refers)
        self._old_places = OldPlaces(self._party.worker, tensors.sources)
        return tensors

    def _allocate(self) -> None:
        staging = self._memory.staging if self._memory is not None else None
        self._memory = ReleasingMemory(self._party, self._lifetimes, self._landing, self._tensors, staging)
        self.peak_bytes = self._memory.peak_bytes() + self.staging_bytes

    def _complaint(self) -> str | None:
        """Why the budget is too small, or None."""
        if self.peak_bytes <= self.budget_bytes + self._leeway_bytes:
            return None
        return (
            f"worker {self._party.worker}: this migration holds up to {self.peak_bytes:,} bytes at once, the budget is "
            f"{self.budget_bytes:,} (old state {self._tensors.old_bytes:,}, buffers {self.staging_bytes:,}); "
            f"allow at least {self.peak_bytes:,}, or plan with smaller rounds"
        )

    def _hold_to_peak(self) -> None:
        assert self._memory is not None
        self._memory.hold_to(self.peak_bytes, self.staging_bytes)

    def _part(self, of: Refer | Transfer) -> torch.Tensor:
        return self._tensors.targets[Shard(of.tensor, of.target_box)][of.box.within(of.target_box)]
