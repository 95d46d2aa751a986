"""Building a generation beside training: its groups, its part of the model, and the migration into it.

Everything here runs on a background thread while the main thread trains on in the previous generation. All workers of
both generations take part (`crew`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from etc_agent.control.causes import ErrorKind, kind_of
from etc_agent.errors import RelayedError, one_line
from etc_agent.integrations.native import TrainState, shards_of
from etc_agent.migration.modes import Choice, Wish, choose_mode, free_bytes
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.planner.plan import MigrationPlan
from etc_agent.state.encoding import decode_manifest, encode_manifest
from etc_agent.state.layout import Shard
from etc_agent.worker.change.amending import amend, check_carried, gather_amendments, warn_of_losses
from etc_agent.worker.change.crew import Crew
from etc_agent.worker.change.exchange import gather_json
from etc_agent.worker.change.holdings import Holdings
from etc_agent.worker.change.make_mode import make_mode, make_plan_for
from etc_agent.worker.change.mode import Mode
from etc_agent.worker.change.rng import carried_stream
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.model import Build, build_on_meta
from etc_agent.worker.settings import Settings
from etc_agent.worker.vote import Vote
from etc_agent.worker.world.build import build
from etc_agent.worker.world.connections import Connections, StoreConnection
from etc_agent.worker.world.stores import connect_store, meet, raw_group
from etc_agent.worker.world.swap import World, entered

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PreparedGeneration:
    """Everything that the switch needs. `next` is None on a worker that leaves, the streams where none is carried. In
    `release` mode the model in `next` is on the meta device until its tensors have come.

    `holdings`: what this worker held when it was prepared, None where it joins. `has_values`: whether the optimizer of
    any worker keeps Python values for some parameters. `moved_bytes`: between all workers.
    """

    generation: Generation
    previous: Generation
    slot: Slot
    crew: Crew
    group: dist.ProcessGroup
    plan: MigrationPlan
    moved_bytes: int
    choice: Choice
    mode: Mode
    next: LiveGeneration | None
    holdings: Holdings | None
    has_values: bool
    old_stream: tuple[Shard, torch.Tensor] | None
    new_stream: Shard | None
    phases_ms: dict[str, float] = field(default_factory=dict)

    def close(self) -> None:
        """Drop it all, connections included; the other workers' next operation on them fails."""
        if self.next is not None:
            self.next.world.close()
        self.next = None
        self.holdings = None
        self.mode.close()
        self.group = None  # type: ignore[assignment]


class Owner(Protocol):
    """The change that is prepared: it knows the connections that are made, and says when to stop."""

    connections: Connections
    store_connection: StoreConnection

    def check(self) -> None:
        """Raises an EtcError where the change is not wanted any more."""

    def holdings(self) -> Holdings | None:
        """What this worker holds, taken at a safe point; None where it joins."""

    def await_memory(self) -> None:
        """Wait until what earlier generations held is freed."""


def prepare(
    owner: Owner, generation: Generation, previous: Generation, slot: Slot, script: Build, settings: Settings
) -> PreparedGeneration:
    """Build `generation` for the worker at `slot`.

    Raises:
        ValueError, EtcError: the model refuses the config, on this worker or another; or the manifests do not fit.
        RuntimeError: a worker was lost, or did not come in time.
    """
    phases_ms: dict[str, float] = {}
    crew = Crew.of(slot, generation, previous)
    device = settings.device
    with ExitStack() as undo:
        with _phase(phases_ms, "groups"):
            store = _store(owner, generation, settings)
            _meet(owner, store, "arrived", crew, "", settings)
            group = _migration_group(owner, store, crew, settings)
            world, vote = None, None
            if crew.new_rank is not None:
                world = _next_world(owner, store, crew.new_rank, generation, settings)
                undo.callback(world.close)
                vote = _vote(owner, store, crew.new_rank, generation, settings)
            _exchange_ports(owner, store, crew, settings)
        with _phase(phases_ms, "build"):
            state, refusal = None, None
            if world is not None:
                try:
                    state = build_on_meta(script, world, device, generation.id, settings.global_batch)
                except Exception as error:
                    # Told to the others with the manifests, so that nobody waits for this worker.
                    refusal = (kind_of(error), one_line(error))
            owner.check()
            holdings = owner.holdings()
        with _phase(phases_ms, "amend"):
            said = gather_amendments(group, holdings)
            refusal = refusal or amend(state, world, said)
            sources = dict(holdings.tensors) if holdings is not None else {}
            old_stream = _old_stream(crew, generation, previous, device)
            if old_stream is not None:
                sources[old_stream[0]] = old_stream[1]
            manifest, new_stream = _new_manifest(state, world, crew, generation, previous, device)
        with _phase(phases_ms, "memory"):
            owner.await_memory()
            owner.check()
        with _phase(phases_ms, "manifests"):
            wish = _wish(settings, crew)
            rows = gather_json(group, _say(tuple(sources), manifest, refusal, wish))
            _refuse_if_any(rows)
        following = None
        if world is not None and state is not None:
            assert crew.new_rank is not None
            context = ParallelContext(
                generation.config, world.mesh, crew.new_rank, device, generation.id, settings.global_batch
            )
            following = LiveGeneration(generation.id, world, vote, state, context)
        with _phase(phases_ms, "plan"):
            old, new = ([decode_manifest(row[side]) for row in rows] for side in ("old", "new"))
            dropped = check_carried(said, old, new)
            if crew.old_rank is not None:
                at = previous.config.coordinate(crew.old_rank)
                warn_of_losses(generation.id, dropped if crew.worker == 0 else (), holdings, at.dp == at.tp == 0)
            choice = choose_mode([Wish(**row["wish"]) for row in rows], old, new)
            plan = make_plan_for(choice, old, new, list(crew.nodes))
            if choice.mode == "release" and crew.worker == 0:
                _log.warning(
                    "generation %d is migrated to in release mode, since %s: once that has begun, the old state "
                    "goes as the new one comes, and a worker lost meanwhile takes its part of it along",
                    generation.id, choice.why,
                )
        with _phase(phases_ms, "allocate"):
            mode = make_mode(choice, plan, crew.worker, group, sources, manifest, following, settings)
        owner.check()
        with _phase(phases_ms, "connect"):
            mode.migration.prepare()
        undo.pop_all()
    return PreparedGeneration(
        generation, previous, slot, crew, group, plan, plan.moved_bytes, choice, mode, following,
        holdings, any(row["has_values"] for row in said), old_stream, new_stream, phases_ms,
    )


@contextmanager
def _phase(phases_ms: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    phases_ms[name] = (time.perf_counter() - start) * 1e3


def _store(owner: Owner, generation: Generation, settings: Settings) -> dist.Store:
    """The generation's part of its store, over a client of the change's own."""
    port = int(generation.store.rpartition(":")[2])
    client = owner.store_connection.record(lambda: connect_store(generation.store, settings.timeout_s), port)
    return dist.PrefixStore(f"gen{generation.id}", client)


def _meet(owner: Owner, store: dist.Store, name: str, crew: Crew, value: str, settings: Settings) -> list[bytes]:
    meeting = dist.PrefixStore("meetings", store)
    return meet(meeting, name, crew.worker, crew.num_workers, value, settings.switch_timeout_s, owner.check)


def _exchange_ports(owner: Owner, store: dist.Store, crew: Crew, settings: Settings) -> None:
    """Tell each other where the groups of this change listen, so that each can cut its connections to the others."""
    rows = _meet(owner, store, "ports", crew, json.dumps(owner.connections.listening), settings)
    owner.connections.learn((address, port) for row in rows for address, port in json.loads(row))


def _migration_group(owner: Owner, store: dist.Store, crew: Crew, settings: Settings) -> dist.ProcessGroup:
    """Over all workers of the change. It is made once they are all there: nobody waits long for it."""
    prefixed = dist.PrefixStore("migration", store)
    return owner.connections.record(
        lambda: raw_group(prefixed, crew.worker, crew.num_workers, settings.switch_timeout_s), lambda _: 1
    )


def _next_world(owner: Owner, store: dist.Store, rank: int, generation: Generation, settings: Settings) -> World:
    prefixed = dist.PrefixStore("world", store)
    return owner.connections.record(
        lambda: build(prefixed, rank, generation.config, generation.id, settings.device, settings.timeout_s),
        lambda world: len(world.groups),
    )


def _vote(owner: Owner, store: dist.Store, rank: int, generation: Generation, settings: Settings) -> Vote:
    prefixed = dist.PrefixStore("vote", store)
    return owner.connections.record(
        lambda: Vote(prefixed, rank, generation.config.num_ranks, settings.timeout_s), lambda _: 1
    )


def _old_stream(
    crew: Crew, generation: Generation, previous: Generation, device: torch.device
) -> tuple[Shard, torch.Tensor] | None:
    """The random stream of this worker, where that is carried on, and a buffer for it."""
    if crew.old_rank is None:
        return None
    shard = carried_stream(crew.old_rank, previous.config, generation.config, device)
    if shard is None:
        return None
    return shard, torch.zeros(shard.box.shape, dtype=torch.uint8, device="cpu")


def _new_manifest(
    state: TrainState | None,
    world: World | None,
    crew: Crew,
    generation: Generation,
    previous: Generation,
    device: torch.device,
) -> tuple[tuple[Shard, ...], Shard | None]:
    """What this worker will hold, and the random stream among it that it takes over."""
    if state is None or world is None or crew.new_rank is None:
        return (), None
    with entered(world):
        manifest = tuple(shards_of(state))
    stream = carried_stream(crew.new_rank, generation.config, previous.config, device)
    return (manifest if stream is None else (*manifest, stream)), stream


def _wish(settings: Settings, crew: Crew) -> Wish:
    """What this worker asks for; workers of one node share what its host has free."""
    sharing = crew.num_on_this_node if settings.device.type == "cpu" else 1
    return Wish(settings.migration, settings.budget_bytes, free_bytes(settings.device) // sharing)


def _say(
    old: tuple[Shard, ...], new: tuple[Shard, ...], refusal: tuple[ErrorKind, str] | None, wish: Wish
) -> dict[str, Any]:
    return {"old": encode_manifest(old), "new": encode_manifest(new), "refusal": refusal, "wish": asdict(wish)}


def _refuse_if_any(rows: list[dict[str, Any]]) -> None:
    """Raises RelayedError where a worker refuses: of several, what the others most likely follow from."""
    kinds = list(ErrorKind)
    refusals = [row["refusal"] for row in rows if row["refusal"] is not None]
    if refusals:
        kind, error = min(refusals, key=lambda refusal: kinds.index(refusal[0]))
        raise RelayedError(error, kind)
