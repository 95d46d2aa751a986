"""The unsharded model, built once by its own constructors, for jobs that start from the constructors' values."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

import torch

from etc_agent.adapters.protocol import Adapter
from etc_agent.errors import EtcError, named
from etc_agent.integrations.constructed import parameters_on_meta
from etc_agent.integrations.initial import WholeModel
from etc_agent.migration.modes import free_bytes
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.model import build_state
from etc_agent.worker.settings import Settings
from etc_agent.worker.world.build import build_fake
from etc_agent.worker.world.swap import World, entered

_log = logging.getLogger(__name__)

_REMEDY = "give TrainState an init function, which fills in each rank's part"


def build_whole(adapter: Adapter, settings: Settings, generation: int, num_sharing: int) -> WholeModel:
    """The model as `build` makes it for a single rank, on the real device, with torch's generators seeded with the
    session's seed: equal on every worker that calls this, whatever its own config.

    `num_sharing`: the number of workers that allocate memory for it on the same device.

    Raises:
        EtcError: the model cannot be built for a single rank, or it does not fit on the device.
    """
    with contextlib.closing(build_fake(0, ParallelConfig(), settings.device)) as world:
        _check_fits(adapter, world, settings, generation, num_sharing)
        context = ParallelContext.of(world, settings.device, generation, settings.global_batch.size)
        torch.manual_seed(settings.seed)
        with entered(world), settings.device:
            return adapter.whole(context)


def _check_fits(adapter: Adapter, world: World, settings: Settings, generation: int, num_sharing: int) -> None:
    try:
        state = build_state(adapter, world, settings.device, generation, settings.global_batch)
    except ValueError as error:
        raise EtcError(
            f'init="module" builds the model for one rank alone, which it refuses: {error}; {_REMEDY}'
        ) from error
    with entered(world):
        num_bytes = sum(shard.num_bytes for shard in adapter.shards(state) if shard.tensor.name.startswith("model."))
    free = free_bytes(settings.device) // num_sharing
    if num_bytes > free:
        raise EtcError(
            f'init="module" needs {num_bytes:,} bytes for the whole model on every worker, and this one has {free:,} '
            f"free on {settings.device}; {_REMEDY}"
        )


def build_buffers(adapter: Adapter, settings: Settings, generation: int) -> Mapping[str, torch.Tensor]:
    """The buffers that the constructors compute, ``model.<fqn>`` -> the whole tensor. `build` is called for one rank
    alone on the real device, except that parameters go to the meta device as soon as a module has them.

    Returns none where the model cannot be built for one rank alone; a warning says so.
    """
    with contextlib.closing(build_fake(0, ParallelConfig(), settings.device)) as world:
        context = ParallelContext.of(world, settings.device, generation, settings.global_batch.size)
        torch.manual_seed(settings.seed)
        try:
            with entered(world), settings.device, parameters_on_meta():
                return adapter.whole(context).tensors
        except Exception as error:
            _log.warning(
                "the values of buffers that are not persistent are not known, since build() cannot be called for one "
                "rank alone on a real device (%s); write them in a function, init=(weights, function)", named(error),
            )
            return {}
