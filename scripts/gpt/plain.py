"""The same training with torch.distributed alone, at a fixed size: what a session is measured against."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from etc_agent.integrations.native import TrainState, create_optimizer_state, start_values
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.data.division import GlobalBatch
from gpt.data import ByteSamples
from gpt.options import GptOptions, OptionsError
from gpt.training import build


@contextmanager
def plain_world(config: ParallelConfig, global_batch: int) -> Iterator[ParallelContext]:
    """torch.distributed as torchrun's environment describes it, on the parallel grid of `config`.

    Raises:
        OptionsError: the number of workers is not that of `config`.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if config.num_ranks != world_size:
        raise OptionsError(f"{config} needs {config.num_ranks} workers, torchrun started {world_size}")
    device = _device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(device.type, (config.pp, config.dp, config.tp), mesh_dim_names=("pp", "dp", "tp"))
        yield ParallelContext(config, mesh, dist.get_rank(), device, generation=1, global_batch=global_batch)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def build_real(options: GptOptions, parallel: ParallelContext) -> TrainState:
    """A training state on the device, as at the start of a job."""
    with torch.device("meta"):
        state = build(options, parallel)
    create_optimizer_state(state)
    start_values(state, parallel.device, whole=None)
    return state


def sample_ids(step: int, parallel: ParallelContext) -> range:
    """The numbers of this dp rank's samples of a step."""
    return GlobalBatch(parallel.global_batch).ids(step, parallel.coordinate.dp, parallel.config.dp)


def batch_of(data: ByteSamples, step: int, parallel: ParallelContext) -> torch.Tensor:
    """This dp rank's samples of a step: (samples, sequence + 1) int64 on the device."""
    return torch.stack([data[index] for index in sample_ids(step, parallel)]).to(parallel.device)


def apply_update(state: TrainState) -> None:
    """What a session's commit does where every rank agrees."""
    assert state.optimizer is not None
    state.optimizer.step()
    if state.scheduler is not None:
        state.scheduler.step()
    state.optimizer.zero_grad(set_to_none=True)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
