"""Calling the script's `build` on the meta device, in a given world, for a given position in the grid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch

from etc_agent.adapters.transformers import structure_alone
from etc_agent.errors import ConfigRefusedError, EtcError, named, one_line
from etc_agent.integrations.amendments import Built
from etc_agent.integrations.native import TrainState, create_optimizer_state, shards_of
from etc_agent.parallel.config import ParallelConfig
from etc_agent.state.describing import layout_by_class
from etc_agent.state.encoding import encode_layout
from etc_agent.state.layout import Shard
from etc_agent.worker.change.state.user_state import rules_of
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.data.division import GlobalBatch
from etc_agent.worker.own_dtype import own_default_dtype
from etc_agent.worker.staying_on_meta import StayingOnMeta
from etc_agent.worker.world.build import build_fake
from etc_agent.worker.world.swap import World, entered

Build = Callable[[ParallelContext], TrainState]

_ON_META: Final = (
    "it runs on the meta device, where tensors have no values, so it must not read them (item(), numpy()) or wrap the "
    "model in DistributedDataParallel: TrainState(activate=...) is where it is wrapped or compiled"
)


def build_on_meta(
    build: Build, world: World, device: torch.device, generation: int, global_batch: GlobalBatch
) -> TrainState:
    """This rank's part of the model and optimizer in `world`, optimizer state included, without storage.

    Raises:
        ConfigRefusedError: the model refuses the config: `build` raises ValueError.
        EtcError: `build` did not return a TrainState, or one of its extras has an unknown rule.
    """
    global_batch.check(world.config)
    context = ParallelContext.of(world, device, generation, global_batch.size)
    with entered(world), torch.device("meta"), StayingOnMeta(), own_default_dtype(), structure_alone():
        try:
            state = build(context)
        except ValueError as error:
            raise ConfigRefusedError(one_line(error)) from error
        except Exception as error:
            if "meta" in str(error).lower():
                raise EtcError(f"build() raised {named(error)}: {_ON_META}") from error
            raise
    if not isinstance(state, TrainState):
        raise EtcError(f"build() returned a {type(state).__name__}; it must return an etc_agent.TrainState")
    rules_of(state)
    with entered(world):
        create_optimizer_state(state)
    state.as_built = Built.of(state)
    return state


def describe(
    build: Build, config: ParallelConfig, device: torch.device, generation: int, global_batch: GlobalBatch
) -> dict[str, Any]:
    """The layout that the model would have under `config`, encoded; derived from single ranks (`layout_by_class`),
    without peers or storage.

    Raises:
        ConfigRefusedError: the model refuses the config.
    """
    global_batch.check(config)
    try:
        layout = layout_by_class(
            config, lambda rank: _described(build, rank, config, device, generation, global_batch)
        )
    except EtcError as error:  # nothing here waits for peers or allocates memory, so a retry would fail the same way
        raise ConfigRefusedError(one_line(error)) from error
    return encode_layout(layout)


def _described(
    build: Build, rank: int, config: ParallelConfig, device: torch.device, generation: int, global_batch: GlobalBatch
) -> tuple[Shard, ...]:
    with contextlib.closing(build_fake(rank, config, device)) as world:
        state = build_on_meta(build, world, device, generation, global_batch)
        with entered(world):
            return tuple(shards_of(state))
