"""`release` mode: old and new state do not fit together, so memory comes and goes with the rounds."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from etc_agent.migration.check import check_tensors, describe, needed_shards
from etc_agent.migration.engine import Migration, Progress, contents
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory.binding import BoundMessage, BoundRound, LocalCopies
from etc_agent.migration.memory.bits import copy_bits
from etc_agent.migration.memory.carrying import refers_to_carry
from etc_agent.migration.memory.lifetimes import Step, default_budget_bytes, lifetimes_of
from etc_agent.migration.memory.memory_file import can_share
from etc_agent.migration.memory.rebinding import rebound_shards
from etc_agent.migration.memory.storage import OnDemand
from etc_agent.migration.report import MigrationReport, SpanRecorder
from etc_agent.migration.schedule import WINDOW
from etc_agent.migration.transport.landing import Clearances, Landing, share_landing
from etc_agent.migration.transport.wire import Operation
from etc_agent.planner.plan import MigrationPlan, Refer, Transfer
from etc_agent.state.algebra import subtract_all
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Shard

_NAMED = 5
"""Shards named in a message; of more only the number."""


_LEEWAY = 16
"""Where nobody named a budget, the buffers of the smallest rounds may take this part of what it has on top, once more:
with tensors of one size two of them take all of it."""


class ReleasingMigration(Migration):
    """One worker's part of a plan in `release` mode.

    New tensors are made as their first bytes are about to arrive; the storage of an old one is emptied when its last
    bytes have gone, whoever else refers to it. A failure loses what was under way: `remaining` says what is left.

    Args:
        sources: the old local tensors by shard, given up by the caller.
        device: where new tensors go.
        budget_bytes: most bytes of old state, new state and staging at once; by default `default_budget_bytes`.
        plan, worker, group, timeout_s, verify: as for `Migration`.

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
        self._device = torch.device(device)
        self._on_demand = OnDemand(worker, sources, self._device)
        self._all_sources = tuple(sources)
        self._setup(plan, worker, self._on_demand, group, timeout_s, verify)
        self._on_demand.keep_whole(self._schedule.refers)
        self._lifetimes = lifetimes_of(self._schedule, sources)
        self._bound: list[BoundRound] | None = None
        self._copies: list[LocalCopies] = []
        self._arrived: list[Transfer] = []
        self._copied: list[Refer] = []
        self.peak_bytes = 0
        self._has_begun = False
        self._landing = Landing(worker)
        self._clearances = Clearances(self._wire.bells, self._schedule)
        self._new_bytes = new_bytes = sum(shard.num_bytes for shard in new_shards)
        sizes = [shard.num_bytes for shard in (*sources, *new_shards)]
        self.budget_bytes = budget_bytes or default_budget_bytes(self._on_demand.old_bytes, new_bytes, sizes)
        on_top_bytes = self.budget_bytes - max(self._on_demand.old_bytes, new_bytes)
        self._leeway_bytes = 0 if budget_bytes else on_top_bytes // _LEEWAY

    @property
    def staging_bytes(self) -> int:
        return super().staging_bytes + self._landing.my_area.num_bytes

    def prepare(self) -> None:
        """Check the budget, agree on the plan with every other worker, warm the connections, touch staging buffers.

        Raises:
            MigrationError: the budget of a worker is too small, or as for `Migration.prepare`.
        """
        on_host = self._device.type == self._wire.device.type == "cpu"
        self._landing = share_landing(self._plan, self._worker, self._peers, wanted=on_host and can_share())
        self._share(self._landing.neighbours, self._landing)
        self._clearances = Clearances(self._wire.bells, self._schedule)
        self._bind()
        freed = self._on_demand.freed_bytes(self._lifetimes)
        peak = self._lifetimes.peak_bytes(self._on_demand.old_bytes, freed, WINDOW) + self.staging_bytes
        self.peak_bytes = peak
        complaint = None
        if peak > self.budget_bytes + self._leeway_bytes:
            complaint = (
                f"worker {self._worker}: this migration holds up to {peak:,} bytes at once, the budget is "
                f"{self.budget_bytes:,} (old state {self._on_demand.old_bytes:,}, buffers {self.staging_bytes:,}); "
                f"allow at least {peak:,}, or plan with smaller rounds"
            )
            self._staging = None
        self._peers.agree(complaint, None)
        self._peers.meet(self._schedule)
        # What the run will hold at its peak anyway may as well be there from the start.
        self._on_demand.touch_ahead(peak - self.staging_bytes - self._on_demand.old_bytes)
        self._limit()

    def run(self, progress: Progress | None = None) -> MigrationReport:
        """Move everything, once.

        Raises:
            MigrationError: as for `Migration.run`, but sources have gone by then; or this has run already.
        """
        if self._has_begun:
            raise MigrationError(
                f"worker {self._worker}: in release mode a migration runs once; plan again from remaining()"
            )
        self._has_begun = self._staging is not None
        return super().run(progress)

    def refresh(self, sources: Mapping[Shard, torch.Tensor]) -> frozenset[Shard]:
        """Take the old tensors as they are now, before `run`. Costs next to nothing where every one has its memory.

        Returns:
            The shards whose tensors have other memory than before.

        Raises:
            MigrationError: as for the constructor.
        """
        rebound = rebound_shards(self._worker, self._storage.sources, sources)
        if rebound:
            check_tensors(self._worker, "old", self._old_shards, sources)
            self._hold(sources)
            self._bind()
            self._limit()
        return rebound

    def remaining(self) -> dict[Shard, torch.Tensor]:
        """What this worker holds of the state at any point, also after a failed run: old shards that are still there,
        and the boxes of new ones that have arrived. No two overlap, so that it is a manifest to plan again from."""
        sources, carried = self._on_demand.sources, self._on_demand.carried
        gone: dict[Shard, list[Box]] = defaultdict(list)
        for refer in self._copied:
            if refer in carried:
                gone[Shard(refer.tensor, refer.source_box)].append(refer.box)
        held = {}
        for shard, tensor in sources.items():
            if shard not in gone:
                held[shard] = tensor
            else:
                rest = subtract_all(shard.box, gone[shard])
                held |= {Shard(shard.tensor, box): tensor[box.within(shard.box)] for box in rest}
        for refer in self._copied:
            if refer in carried or Shard(refer.tensor, refer.source_box) not in sources:
                held[Shard(refer.tensor, refer.box)] = self._part(refer)
        for transfer in self._arrived:
            held[Shard(transfer.tensor, transfer.box)] = self._part(transfer)
        return held

    def account(self) -> str:
        """What a run that failed has given up here, for people; "" where that is nothing."""
        held = self._on_demand.sources
        gone = [describe(shard.tensor, shard.box) for shard in self._all_sources if shard not in held]
        if not gone:
            return ""
        left = sum(shard.num_bytes for shard in self.remaining())
        named = ", ".join(gone[:_NAMED]) + (f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else "")
        return f"worker {self._worker} holds {left:,} bytes of state and has given up its shards of {named}"

    def _hold(self, sources: Mapping[Shard, torch.Tensor]) -> None:
        self._on_demand = OnDemand(self._worker, sources, self._device)
        self._on_demand.keep_whole(self._schedule.refers)
        self._storage = self._on_demand

    def _limit(self) -> None:
        self._on_demand.held_bytes += self.staging_bytes
        self._on_demand.limit_bytes = self.peak_bytes
        self._on_demand.note()

    def _part(self, of: Refer | Transfer) -> torch.Tensor:
        return self._on_demand.targets[Shard(of.tensor, of.target_box)][of.box.within(of.target_box)]

    # -- the rounds of this mode

    def _bind(self) -> None:
        """Where the addresses of new tensors are known ahead, make every view now: thousands, some 10 us each."""
        ahead = self._on_demand.reserve(self._lifetimes, refers_to_carry(self._schedule))
        self._allocate_staging()
        assert self._staging is not None
        self._bound, self._copies = None, []
        if ahead:
            binder = self._binder()
            rounds = enumerate(self._schedule.rounds)
            self._bound = [binder.bind(scheduled, self._staging.slot(number)) for number, scheduled in rounds]
            steps = (*self._lifetimes.local, *self._lifetimes.rounds)
            carried = self._on_demand.carried
            self._copies = [binder.bind_local([r for r in step.refers if r not in carried]) for step in steps]

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        """The caller's stream: new tensors must come from the memory that training allocates from."""
        return contextlib.nullcontext()

    def _before_rounds(self, recorder: SpanRecorder) -> None:
        if self._lifetimes.local:
            with recorder.span("local copies"):
                for number, step in enumerate(self._lifetimes.local):
                    self._open(step, number)
                    self._settle_copies()
                    self._on_demand.close(step)

    def _beside_rounds(self, recorder: SpanRecorder) -> None:
        """Local copies are made as their targets open."""

    def _take(self, number: int) -> BoundRound:
        assert self._staging is not None
        self._open(self._lifetimes.rounds[number], len(self._lifetimes.local) + number)
        if self._bound is not None:
            return self._bound[number]
        return self._binder().bind(self._schedule.rounds[number], self._staging.slot(number))

    def _done(self, number: int) -> None:
        self._arrived += [t for message in self._schedule.rounds[number].receives for t in message.transfers]
        self._on_demand.close(self._lifetimes.rounds[number])
        self._clearances.grant(number + WINDOW)

    def _packed(self, bound: BoundMessage) -> Operation:
        message = bound.message
        if (clearance := self._clearances.of(message)) is not None:
            self._peers.wait(clearance, f"waiting for room for {contents(message)} at worker {message.peer}")
        return super()._packed(bound)

    def _open(self, step: Step, number: int) -> None:
        self._on_demand.open(step)
        local = self._copies[number] if self._copies else self._binder().bind_local(step.refers)
        copy_bits(local.copy_to, local.copy_from)
        self._copied += step.refers
