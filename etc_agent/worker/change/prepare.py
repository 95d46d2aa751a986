"""Preparing a generation beside training: its groups, this worker's part of the model, and the migration into it.

Everything here runs on the change's thread while the main thread continues to train in the previous generation. All
workers of both generations take part (`crew`).
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from etc_agent.adapters.choose import adapter_of
from etc_agent.adapters.protocol import Adapter
from etc_agent.control.causes import kind_of
from etc_agent.errors import EtcError, named, one_line
from etc_agent.integrations.train_state import TrainState
from etc_agent.migration.modes import Choice, ModeRequest, bid_of, choose_together, free_bytes
from etc_agent.migration.own_plan import Change, OwnPlan
from etc_agent.migration.transport.wire import Wire
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.state.layout import Manifest, Shard
from etc_agent.worker.change.artefacts import share_artefacts
from etc_agent.worker.change.crew import Crew
from etc_agent.worker.change.groups import ChangeConnections, GroupMaker, Groups
from etc_agent.worker.change.modes.make_mode import make_mode, plan_for
from etc_agent.worker.change.prepared import PreparedGeneration
from etc_agent.worker.change.state.amending import Said, amend, amendments_of, check_carried, warn_of_losses
from etc_agent.worker.change.state.holdings import Holdings
from etc_agent.worker.change.state.rescued import Rescued
from etc_agent.worker.change.state.rng import carried_stream
from etc_agent.worker.change.told import Refusal, Task, ToldNew, ToldOld, tell_new_side, tell_old_side
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.model import build_state
from etc_agent.worker.redundancy.rebuild import Survivors
from etc_agent.worker.settings import Settings
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.swap import World, entered

_log = logging.getLogger(__name__)

class Owner(Protocol):
    """The change that is being prepared: it knows the connections that are made, and whether it was aborted."""

    connections: ChangeConnections

    def check(self) -> None:
        """Raise an EtcError if the change was aborted."""

    def holdings(self) -> Holdings | None:
        """What this worker holds, taken at a safe point; None where it joins."""

    def rescued(self, survivors: Survivors) -> Rescued:
        """What this worker gives in place of lost ones, from copies; taken with all survivors, after `holdings`."""

    def await_memory(self) -> None:
        """Wait until the memory of earlier generations is freed."""


@dataclass(frozen=True, slots=True, eq=False)
class OldSide:
    """What this worker has of the old state. `stream`: its random stream and a buffer for it, if it is carried over;
    the buffer is among the `sources`, too."""

    holdings: Holdings | None
    sources: dict[Shard, torch.Tensor]
    stream: tuple[Shard, torch.Tensor] | None


@dataclass(frozen=True, slots=True, eq=False)
class NewSide:
    """What this worker will hold. `stream`: the random stream that it takes over; it is in the `manifest`, too.
    `views`: names of tensors that are views of others, and so in no manifest."""

    manifest: Manifest = ()
    stream: Shard | None = None
    views: tuple[str, ...] = ()


def prepare(
    owner: Owner, generation: Generation, previous: Generation, slot: Slot, adapter: Adapter, settings: Settings
) -> PreparedGeneration:
    """Prepare `generation` on the worker in `slot`.

    Raises:
        ValueError, EtcError: the model refuses the config, on this worker or another; or the manifests do not fit.
        RuntimeError: a worker was lost, or did not come in time.
    """
    crew = Crew.of(slot, generation, previous)
    task = Task(generation, previous, crew, settings)
    phases_ms: dict[str, float] = {}
    with ExitStack() as undo:
        with _phase(phases_ms, "groups"):
            groups = GroupMaker(generation, crew, settings, owner.connections, owner.check).make()
            undo.callback(groups.close)
        with _phase(phases_ms, "artefacts"):
            share_artefacts(groups.all_workers, crew, previous.config)
        with _phase(phases_ms, "build"):
            state, refusal = _build(task, groups.world, adapter)
            owner.check()
            holdings = owner.holdings()
        with _phase(phases_ms, "rescue"):
            old = _old_side(task, _with_rescued(task, holdings, owner, groups.all_workers))
        with _phase(phases_ms, "amend"):
            told = tell_old_side(task, groups.all_workers, tuple(old.sources), amendments_of(old.holdings))
            said = told.said
            refusal = refusal or amend(state, groups.world, said)
            new = _new_side(task, state, groups.world, said)
        with _phase(phases_ms, "memory"):
            owner.await_memory()
            owner.check()
        with _phase(phases_ms, "manifests"):
            told_new = tell_new_side(task, groups.all_workers, new.manifest, new.views, refusal)
        with _phase(phases_ms, "plan"):
            choice, own = _plan(task, groups.all_workers, old, told, new, told_new)
            _check_mode(choice, adapter)
        with _phase(phases_ms, "allocate"):
            following = _following(task, groups, state, owner.connections.side)
            mode = make_mode(
                choice, own.plan, crew.worker, groups.all_workers, old.sources, new.manifest, following, settings
            )
            undo.callback(mode.close)
        owner.check()
        with _phase(phases_ms, "connect"):
            mode.migration.prepare()
        undo.pop_all()
    return PreparedGeneration(
        generation, previous, slot, crew, groups.all_workers, own.plan, own.moved_bytes, choice, mode, following,
        old.holdings, any(row["has_values"] for row in said), old.stream, new.stream, owner.connections, phases_ms,
    )


@contextmanager
def _phase(phases_ms: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    phases_ms[name] = (time.perf_counter() - start) * 1e3


def _build(task: Task, world: World | None, adapter: Adapter) -> tuple[TrainState | None, Refusal | None]:
    """This worker's part of the model. An error is returned, and sent with the manifests, so that no worker waits."""
    if world is None:
        return None, None
    settings = task.settings
    try:
        return build_state(adapter, world, settings.device, task.generation.id, settings.global_batch), None
    except (EtcError, ValueError) as error:
        return None, (kind_of(error), one_line(error))
    except (Exception, SystemExit) as error:
        return None, (kind_of(error), f"build() raised {named(error)}")


def _with_rescued(
    task: Task, holdings: Holdings | None, owner: Owner, group: dist.ProcessGroup
) -> Holdings | None:
    """`holdings` with what this worker gives in place of lost ones."""
    lost_slots = task.generation.lost
    if holdings is None or not lost_slots:
        return holdings
    lost = {rank for rank, slot in enumerate(task.previous.placement) if slot in lost_slots}
    workers = {rank: worker for worker, rank in enumerate(task.crew.old_ranks) if rank is not None}
    return replace(holdings, rescued=owner.rescued(Survivors(group, workers, lost)))


def _old_side(task: Task, holdings: Holdings | None) -> OldSide:
    crew = task.crew
    if holdings is None or crew.old_rank is None:
        return OldSide(None, {}, None)
    sources = {**holdings.tensors, **holdings.rescued.tensors}
    shard = carried_stream(crew.old_rank, task.previous.config, task.generation.config, task.settings.device)
    if shard is None:
        return OldSide(holdings, sources, None)
    sources[shard] = torch.zeros(shard.box.shape, dtype=torch.uint8, device="cpu")
    return OldSide(holdings, sources, (shard, sources[shard]))


def _new_side(task: Task, state: TrainState | None, world: World | None, said: Said) -> NewSide:
    crew = task.crew
    if state is None or world is None or crew.new_rank is None:
        return NewSide()
    with entered(world):
        adapter = adapter_of(state)
        manifest = tuple(adapter.shards(state))
        names = {shard.tensor.name for shard in manifest}
        views = tuple(sorted({shard.tensor.name for shard in adapter.held(state)} - names))
    stream = carried_stream(crew.new_rank, task.generation.config, task.previous.config, task.settings.device)
    if stream is not None and not crew.has_old_rank(_same_place(crew.new_rank, task)):
        # It was lost with the worker at that coordinate. A new one is started, unless there is a copy of it.
        stream = stream if any(stream.tensor.name in row["streams"] for row in said) else None
    return NewSide(manifest if stream is None else (*manifest, stream), stream, views)


def _same_place(rank: int, task: Task) -> int:
    """The rank in the previous generation that had the coordinate which `rank` has in the next one."""
    return task.previous.config.rank(task.generation.config.coordinate(rank))


def _mode_request(task: Task) -> ModeRequest:
    """What this worker asks for; workers on one node share the host's free memory."""
    settings = task.settings
    sharing = task.crew.num_on_this_node if settings.device.type == "cpu" else 1
    return ModeRequest(settings.migration, settings.budget_bytes, free_bytes(settings.device) // sharing)


def _plan(
    task: Task, group: dist.ProcessGroup, old: OldSide, told: ToldOld, new: NewSide, told_new: ToldNew
) -> tuple[Choice, OwnPlan]:
    """The mode, equal on every worker, and this worker's part of the plan."""
    crew, generation, settings = task.crew, task.generation, task.settings
    dropped = [name for name in check_carried(told.said, told.names(), told_new.names()) if name not in told_new.views]
    if crew.old_rank is not None:
        at = task.previous.config.coordinate(crew.old_rank)
        warn_of_losses(generation.id, dropped if crew.worker == 0 else (), old.holdings, at.dp == at.tp == 0)
    wire, timeout = Wire(group), datetime.timedelta(seconds=settings.switch_timeout_s)
    held = tuple(old.sources)
    choice = choose_together(wire, bid_of(crew.worker, _mode_request(task), held, new.manifest), timeout)
    if choice.mode == "release" and crew.worker == 0:
        _log.warning(
            "generation %d is migrated to in release mode, since %s: once it has begun, old tensors are released "
            "as new ones arrive, and a worker that is lost then takes state with it",
            generation.id, choice.why,
        )
    change = Change(told.described, told_new.described, held, new.manifest, crew.nodes)
    return choice, plan_for(choice, wire, change, timeout)


def _check_mode(choice: Choice, adapter: Adapter) -> None:
    if choice.mode == "release" and adapter.gives_memory:
        raise EtcError(
            f"release mode, which was chosen since {choice.why}, is not possible with {type(adapter).__name__}, whose "
            "build() gives the next generation its memory: old and new state have to fit in memory together"
        )


def _following(
    task: Task, groups: Groups, state: TrainState | None, side: Connections
) -> LiveGeneration | None:
    """The next generation on this worker, not yet with memory."""
    generation, settings, rank = task.generation, task.settings, task.crew.new_rank
    if state is None or groups.world is None or rank is None:
        return None
    context = ParallelContext.of(groups.world, settings.device, generation.id, settings.global_batch.size)
    return LiveGeneration(generation.id, groups.world, groups.vote, side, state, context, groups.copies)
