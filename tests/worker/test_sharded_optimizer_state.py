"""Optimizer state beside sharded parameters, as it is found before a job starts: described, or refused by name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import etc_agent as etc
from etc_agent.adapters.native import Native
from etc_agent.parallel.config import ParallelConfig
from etc_agent.planner.errors import PlanError
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.state.layout import Layout
from etc_agent.worker.data.division import GlobalBatch
from etc_agent.worker.model import build_state
from etc_agent.worker.world.build import build_fake
from etc_agent.worker.world.swap import entered, install

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
from optimizers_of_users import NumbersPerParameter, Quantised

from etc_agent.integrations.native import shards_of

CPU = torch.device("cpu")


class Rows(torch.optim.Optimizer):
    """Statistics of rows and columns, as DTensors where the parameter is one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state and param.dim() > 1:
                state["row"] = torch.zeros_like(param.grad.mean(-1))
                state["column"] = torch.zeros_like(param.grad.mean(-2))
            elif not state:
                state["whole"] = torch.zeros_like(param)


class ByLocalSize(torch.optim.Optimizer):
    """Half the precision where much of the parameter is on this rank."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for param in self.param_groups[0]["params"]:
            local = param.to_local() if isinstance(param, DTensor) else param
            dtype = torch.bfloat16 if local.numel() > 20 else torch.float32
            self.state[param].setdefault("sum", torch.zeros_like(param, dtype=dtype))


def layout(optimizer: Callable[[Any], torch.optim.Optimizer], tp: int) -> Layout:
    """What each rank holds of a linear layer of 8 x 4, whose rows are cut over tp."""

    def build(parallel: etc.ParallelContext) -> etc.TrainState:
        model = nn.Sequential(nn.Linear(4, 8))
        if parallel.config.tp > 1:
            parallelize_module(model, parallel.mesh["tp"], {"0": ColwiseParallel()})
        return etc.TrainState(model, optimizer(model.parameters()))

    install()
    config, manifests = ParallelConfig(tp=tp), []
    for rank in range(tp):
        with contextlib.closing(build_fake(rank, config, CPU)) as world:
            state = build_state(Native(build), world, CPU, 1, GlobalBatch(4))
            with entered(world):
                manifests.append(tuple(shards_of(state)))
    return tuple(manifests)


def boxes(manifest: Any) -> dict[str, Any]:
    prefix = "optimizer.0."
    return {
        shard.tensor.name.removeprefix(prefix): (shard.tensor.shape, shard.box.offset, shard.box.shape)
        for shard in manifest
        if shard.tensor.name.startswith(prefix)
    }


def test_factored_state_that_is_a_dtensor_has_the_box_that_its_placements_give() -> None:
    assert boxes(layout(Rows, 2)[1]) == {
        "weight.row": ((8,), (4,), (4,)), "weight.column": ((4,), (0,), (4,)), "bias.whole": ((8,), (4,), (4,)),
    }
    assert boxes(layout(torch.optim.Adafactor, 2)[1])["weight.row_var"] == ((8, 1), (0, 0), (8, 1))
    make_plan([*layout(Rows, 1), ()], layout(Rows, 2))


@pytest.mark.parametrize(("optimizer", "name"), [(NumbersPerParameter, "weight.row"), (Quantised, "weight.table")])
def test_plain_state_of_another_shape_beside_a_sharded_parameter_is_refused_at_the_start(
    optimizer: Callable[[Any], torch.optim.Optimizer], name: str
) -> None:
    assert layout(optimizer, 1)
    with pytest.raises(etc.EtcError, match=rf"^optimizer\.0\.{name} of shape .* make it a DTensor"):
        layout(optimizer, 2)


def test_state_whose_kind_depends_on_the_local_size_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"^optimizer\.0\.weight\.sum: was bfloat16 of shape .* is float32"):
        make_plan([*layout(ByLocalSize, 1), ()], layout(ByLocalSize, 2))
