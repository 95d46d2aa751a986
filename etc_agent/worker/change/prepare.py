"""Building a generation beside training: its groups, its part of the model, and the migration into it.

Everything here runs on a background thread while the main thread trains on in the previous generation. All workers of
both generations take part (`crew`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from etc_agent.control.causes import ErrorKind, kind_of
from etc_agent.errors import RelayedError, one_line
from etc_agent.integrations.native import TrainState, held_shards, materialise, shards_of
from etc_agent.migration.engine import Migration
from etc_agent.migration.memory.shared import shared_memory_for
from etc_agent.migration.modes import Choice, Wish, choose_mode, free_bytes
from etc_agent.migration.release import ReleasingMigration
from etc_agent.migration.release_plan import plan_release
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.planner.migration import make_plan
from etc_agent.planner.plan import MigrationPlan
from etc_agent.state.encoding import decode_manifest, encode_manifest
from etc_agent.state.layout import Shard
from etc_agent.worker.change.crew import Crew
from etc_agent.worker.change.exchange import gather_json
from etc_agent.worker.change.rng import carried_stream
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.model import Build, build_on_meta
from etc_agent.worker.settings import Settings
from etc_agent.worker.vote import Vote
from etc_agent.worker.world.build import build
from etc_agent.worker.world.stores import connect_store, raw_group
from etc_agent.worker.world.swap import World, entered

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PreparedGeneration:
    """Everything that the switch needs. `next` is None on a worker that leaves, the streams where none is carried. In
    `release` mode the model in `next` is on the meta device until its tensors have come.

    `old_shards`: the shards of the live state by name, so that the switch need not work them out again. `moved_bytes`:
    between all workers.
    """

    generation: Generation
    previous: Generation
    slot: Slot
    crew: Crew
    group: dist.ProcessGroup
    plan: MigrationPlan
    moved_bytes: int
    choice: Choice
    migration: Migration
    next: LiveGeneration | None
    old_shards: dict[str, Shard]
    old_stream: tuple[Shard, torch.Tensor] | None
    new_stream: tuple[Shard, torch.Tensor] | None
    phases_ms: dict[str, float] = field(default_factory=dict)

    def close(self) -> None:
        """Drop it all, connections included; the other workers' next operation on them fails."""
        if self.next is not None:
            self.next.world.close()
        self.next = None
        if self.migration is not None:
            self.migration.close()
        self.group = self.migration = None  # type: ignore[assignment]


def prepare(
    generation: Generation,
    previous: Generation,
    slot: Slot,
    script: Build,
    live: LiveGeneration | None,
    settings: Settings,
) -> PreparedGeneration:
    """Build `generation` for the worker at `slot`; `live` is None where it joins.

    Raises:
        ValueError, EtcError: the model refuses the config, on this worker or another; or the manifests do not fit.
        RuntimeError: a worker was lost, or did not come in time.
    """
    phases_ms: dict[str, float] = {}
    crew = Crew.of(slot, generation, previous)
    device = settings.device
    with ExitStack() as undo:
        with _phase(phases_ms, "groups"):
            store = dist.PrefixStore(f"gen{generation.id}", connect_store(generation.store, settings.timeout_s))
            group = raw_group(
                dist.PrefixStore("migration", store), crew.worker, crew.num_workers, settings.switch_timeout_s
            )
            world, vote = _next_world(store, crew, generation, settings) if crew.new_rank is not None else (None, None)
            if world is not None:
                undo.callback(world.close)
        with _phase(phases_ms, "build"):
            state, refusal = None, None
            if world is not None:
                try:
                    state = build_on_meta(script, world, device, generation.id, settings.global_batch)
                except Exception as error:
                    # Told to the others with the manifests, so that nobody waits for this worker.
                    refusal = (kind_of(error), one_line(error))
            sources, old_stream = _old_shards(live, crew, generation, previous, device)
            manifest, new_stream = _new_manifest(state, world, crew, generation, previous, device)
        with _phase(phases_ms, "manifests"):
            wish = _wish(settings, crew)
            rows = gather_json(group, _say(tuple(sources), manifest, refusal, wish))
            _refuse_if_any(rows)
        with _phase(phases_ms, "plan"):
            old, new = ([decode_manifest(row[side]) for row in rows] for side in ("old", "new"))
            choice = choose_mode([Wish(**row["wish"]) for row in rows], old, new)
            if choice.mode == "release":
                plan = plan_release(old, new, choice.budget_bytes, list(crew.nodes))
                if crew.worker == 0:
                    _log.warning(
                        "generation %d is migrated to in release mode, since %s: once that has begun, the old state "
                        "goes as the new one comes, and a worker lost meanwhile takes its part of it along",
                        generation.id, choice.why,
                    )
            else:
                # On one host nobody's port is relieved by a detour.
                plan = make_plan(old, new, nodes=list(crew.nodes), forwarding=len(set(crew.nodes)) > 1)
        with _phase(phases_ms, "allocate"):
            keeps = choice.mode == "keep"
            memory = shared_memory_for(plan, crew.worker, device) if keeps else None
            shared = {} if memory is None else memory.tensors
            targets = {}
            if keeps and state is not None and world is not None:
                targets = _materialised(state, world, plan, crew, sources, shared, device)
            if keeps and new_stream is not None:
                new_stream = (new_stream[0], shared.get(*new_stream))
                targets[new_stream[0]] = new_stream[1]
        with _phase(phases_ms, "connect"):
            migration: Migration
            timeout_s, verify = settings.switch_timeout_s, settings.verify_dir is not None
            if keeps:
                migration = Migration(
                    plan, crew.worker, sources, targets, group, timeout_s=timeout_s, memory=memory, verify=verify
                )
            else:
                migration = ReleasingMigration(
                    plan, crew.worker, sources, group,
                    timeout_s=timeout_s, device=device, budget_bytes=choice.budget_bytes, verify=verify,
                )
            migration.prepare()
        following = None
        if world is not None and state is not None:
            assert crew.new_rank is not None
            context = ParallelContext(
                generation.config, world.mesh, crew.new_rank, device, generation.id, settings.global_batch
            )
            following = LiveGeneration(generation.id, world, vote, state, context)
        undo.pop_all()
    return PreparedGeneration(
        generation, previous, slot, crew, group, plan, plan.moved_bytes, choice, migration, following,
        {shard.tensor.name: shard for shard in sources}, old_stream, new_stream, phases_ms,
    )


@contextmanager
def _phase(phases_ms: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    phases_ms[name] = (time.perf_counter() - start) * 1e3


def _next_world(
    store: dist.Store, crew: Crew, generation: Generation, settings: Settings
) -> tuple[World, Vote]:
    assert crew.new_rank is not None
    world = build(
        dist.PrefixStore("world", store), crew.new_rank, generation.config, generation.id, settings.device,
        settings.timeout_s,
    )
    try:
        vote = Vote(dist.PrefixStore("vote", store), crew.new_rank, generation.config.num_ranks, settings.timeout_s)
    except BaseException:
        world.close()
        raise
    return world, vote


def _old_shards(
    live: LiveGeneration | None, crew: Crew, generation: Generation, previous: Generation, device: torch.device
) -> tuple[dict[Shard, torch.Tensor], tuple[Shard, torch.Tensor] | None]:
    """What this worker holds now, with a buffer for its random stream where that is carried on."""
    if live is None or crew.old_rank is None:
        return {}, None
    sources = held_shards(live.state)
    stream = _with_buffer(carried_stream(crew.old_rank, previous.config, generation.config, device))
    if stream is not None:
        sources[stream[0]] = stream[1]
    return sources, stream


def _new_manifest(
    state: TrainState | None,
    world: World | None,
    crew: Crew,
    generation: Generation,
    previous: Generation,
    device: torch.device,
) -> tuple[tuple[Shard, ...], tuple[Shard, torch.Tensor] | None]:
    """What this worker will hold, with a buffer for the random stream that it takes over."""
    if state is None or world is None or crew.new_rank is None:
        return (), None
    with entered(world):
        manifest = tuple(shards_of(state))
    stream = _with_buffer(carried_stream(crew.new_rank, generation.config, previous.config, device))
    return (manifest if stream is None else (*manifest, stream[0])), stream


def _with_buffer(shard: Shard | None) -> tuple[Shard, torch.Tensor] | None:
    if shard is None:
        return None
    return shard, torch.zeros(shard.box.shape, dtype=torch.uint8, device="cpu")


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


def _materialised(
    state: TrainState,
    world: World,
    plan: MigrationPlan,
    crew: Crew,
    sources: dict[Shard, torch.Tensor],
    shared: dict[Shard, torch.Tensor],
    device: torch.device,
) -> dict[Shard, torch.Tensor]:
    """Give `state` storage: that of the old shard where the plan keeps it whole, else new memory, already touched.

    `shared`: memory that workers of this host can write to.
    """
    kept = {
        Shard(refer.tensor, refer.target_box): sources[Shard(refer.tensor, refer.source_box)]
        for refer in plan.refers
        if refer.worker == crew.worker and refer.is_whole
    }

    def provide(shard: Shard, meta: torch.Tensor) -> torch.Tensor:
        if shard in kept:
            return kept[shard]
        if shard in shared and meta.is_contiguous():
            return shared[shard]
        return torch.empty_like(meta, device=device).zero_()

    with entered(world):
        materialise(state, provide)
        return shards_of(state)
