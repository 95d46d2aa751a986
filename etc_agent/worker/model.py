"""Building a rank's part of the state in a given world, for a given position in the grid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from etc_agent.adapters.protocol import Adapter
from etc_agent.errors import ConfigRefusedError, EtcError, one_line
from etc_agent.integrations.train_state import TrainState
from etc_agent.parallel.config import ParallelConfig
from etc_agent.state.describing import layout_by_class
from etc_agent.state.encoding import encode_layout
from etc_agent.state.layout import Shard
from etc_agent.worker.change.state.user_state import rules_of
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.data.division import GlobalBatch
from etc_agent.worker.world.build import build_fake
from etc_agent.worker.world.swap import World, entered

Build = Callable[[ParallelContext], TrainState]


def build_state(
    adapter: Adapter, world: World, device: torch.device, generation: int, global_batch: GlobalBatch
) -> TrainState:
    """This rank's part of the model and optimizer in `world`, optimizer state included.

    Raises:
        ConfigRefusedError: the model refuses the config: `build` raises ValueError.
        EtcError: `build` did not return a TrainState, or one of its extras has an unknown rule.
    """
    global_batch.check(world.config)
    context = ParallelContext.of(world, device, generation, global_batch.size)
    with entered(world):
        state = adapter.build(context)
    state.adapter = adapter
    rules_of(state)
    return state


def describe(
    adapter: Adapter, config: ParallelConfig, device: torch.device, generation: int, global_batch: GlobalBatch
) -> dict[str, Any]:
    """The layout that the model would have under `config`, encoded; derived from single ranks (`layout_by_class`),
    without peers or storage.

    Raises:
        ConfigRefusedError: the model refuses the config.
    """
    global_batch.check(config)
    try:
        layout = layout_by_class(
            config, lambda rank: _described(adapter, rank, config, device, generation, global_batch)
        )
    except EtcError as error:  # nothing here waits for peers or allocates memory, so a retry would fail the same way
        raise ConfigRefusedError(one_line(error)) from error
    return encode_layout(layout)


def _described(
    adapter: Adapter, rank: int, config: ParallelConfig, device: torch.device, generation: int,
    global_batch: GlobalBatch,
) -> tuple[Shard, ...]:
    with contextlib.closing(build_fake(rank, config, device)) as world:
        state = build_state(adapter, world, device, generation, global_batch)
        with entered(world):
            return tuple(adapter.shards(state))
