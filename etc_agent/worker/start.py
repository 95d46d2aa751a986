"""The first generation of a worker that does not join a running job: its store, groups, state and random stream."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from etc_agent.adapters.protocol import Adapter
from etc_agent.errors import ConfigRefusedError, EtcError
from etc_agent.integrations.host_state import set_rng_state
from etc_agent.integrations.train_state import TrainState, init_steps
from etc_agent.integrations.weights import fill_lost, has_lost_buffers, open_weights, takes_weights
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.change.exchange import gather_json
from etc_agent.worker.change.state.rng import start_stream
from etc_agent.worker.checkpoints.loading import load_newest
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.model import build_state
from etc_agent.worker.process.environment import WorkerEnvironment
from etc_agent.worker.settings import Settings
from etc_agent.worker.vote import Vote
from etc_agent.worker.whole import build_buffers, build_whole
from etc_agent.worker.world.build import build
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.stores import connect_store, copies_group
from etc_agent.worker.world.swap import World, activate, deactivate


def start_fresh(
    environment: WorkerEnvironment, config: ParallelConfig, adapter: Adapter, settings: Settings
) -> tuple[LiveGeneration, int]:
    """Build and enter the generation that this worker was started for. Collective over its ranks.

    Returns the generation and the index of its first step.

    Raises:
        ConfigRefusedError: the model refuses `config`.
        EtcError: the config needs another number of workers, the store does not answer, a tensor has no initial value,
            or the ranks' `init` functions return different first steps.
    """
    if config.num_ranks != environment.world_size:
        raise EtcError(
            f"{config} has {config.num_ranks} ranks, but {environment.world_size} workers were started; "
            f"choose a config whose degrees multiply to {environment.world_size}"
        )
    settings.global_batch.check(config)
    store = dist.PrefixStore(f"gen{environment.generation}", _store(environment, settings))
    world = build(
        dist.PrefixStore("world", store), environment.rank, config, environment.generation, settings.device,
        settings.timeout_s,
    )
    # Under plain torchrun the size never changes between two steps, so only checkpoints need a vote.
    rank, vote, copies, side = environment.rank, None, None, Connections()
    if environment.socket is not None or settings.checkpoint is not None:
        vote = Vote(dist.PrefixStore("vote", store), rank, config.num_ranks, settings.timeout_s, side)
    if environment.socket is not None:
        copies = copies_group(store, rank, config.num_ranks, settings.redundancy, settings.timeout_s, side)
    context = ParallelContext.of(world, settings.device, environment.generation, settings.global_batch.size)
    activate(world)
    try:
        state, step = _started(environment, adapter, settings, world, context)
    except BaseException:
        # So that a script which catches the error can open another session.
        world.close()
        deactivate()
        raise
    return LiveGeneration(environment.generation, world, vote, side, state, context, copies), step


def _started(
    environment: WorkerEnvironment, adapter: Adapter, settings: Settings, world: World, context: ParallelContext
) -> tuple[TrainState, int]:
    """The state in its active `world`, and the first step."""

    def build_own() -> TrainState:
        return _built(adapter, world, environment.generation, settings)

    loaded = None
    if settings.checkpoint is not None:
        loaded = load_newest(build_own, Path(settings.checkpoint.folder).absolute(), settings, context, world)
    state, step = (
        (loaded.state, loaded.step) if loaded else _first_values(build_own, environment, adapter, settings, world)
    )
    adapter.enter(state)
    start_stream(settings.seed, environment.generation, environment.rank)
    if loaded is not None and loaded.stream is not None:
        set_rng_state(settings.device, loaded.stream)
    return state, step


def _first_values(
    build_own: Callable[[], TrainState], environment: WorkerEnvironment, adapter: Adapter, settings: Settings,
    world: World,
) -> tuple[TrainState, int]:
    """A state with the values that `TrainState.init` says, and the first step."""
    state, whole = build_own(), None
    if adapter.takes_module_values(state):
        num_sharing = environment.local_world_size if settings.device.type == "cpu" else 1
        whole = build_whole(adapter, settings, environment.generation, num_sharing)
    elif takes_weights(state):
        buffers = build_buffers(adapter, settings, environment.generation) if has_lost_buffers(state) else {}
        state.init = (partial(fill_lost, constructed=buffers), *init_steps(state.init))
    open_weights(state, lambda value: gather_json(world.groups[0], value))
    # Equal on every rank, so that an init which draws from torch's generators gives all replicas the same values.
    torch.manual_seed(settings.seed)
    return state, _agreed(adapter.start_values(state, settings.device, whole), settings.device)


def _built(adapter: Adapter, world: World, generation: int, settings: Settings) -> TrainState:
    """This rank's part of the model. If one rank's model refuses the config, every rank raises with that reason.

    Raises:
        ConfigRefusedError: the model refuses the config.
    """
    state, refused = None, None
    try:
        state = build_state(adapter, world, settings.device, generation, settings.global_batch)
    except ConfigRefusedError as error:
        refused = error
    reasons = [reason for reason in gather_json(world.groups[0], str(refused or "")) if reason]
    if state is None or reasons:
        raise ConfigRefusedError(reasons[0]) from refused
    return state


def _agreed(step: int, device: torch.device) -> int:
    """Return `step` after checking that every rank has the same."""
    bounds = torch.tensor([step, -step], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    last, first = int(bounds[0]), -int(bounds[1])
    if first != last:
        raise EtcError(f"TrainState.init returned step {first} on one rank and {last} on another; load one checkpoint")
    return step


def _store(environment: WorkerEnvironment, settings: Settings) -> dist.Store:
    """The store at which the ranks meet: the agent's, torchrun's, or one for this process alone."""
    if environment.socket is not None:
        return connect_store(environment.store, settings.timeout_s)
    if environment.world_size == 1 and "RANK" not in os.environ:
        return dist.HashStore()
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=settings.timeout_s)))
    except (ValueError, RuntimeError) as error:
        raise EtcError(f"cannot meet the other workers: {str(error).splitlines()[0]}") from None
    return store
