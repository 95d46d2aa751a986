"""What a script may do to the memory of its tensors between two steps: for `tiny_job`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import etc_agent as etc


def exchange_weights(state: etc.TrainState, blocks: list[Any]) -> None:
    """As for an evaluation with averaged weights."""
    one, other = blocks[0].up.weight, blocks[1].up.weight
    one.data, other.data = other.data, one.data


def exchange_moments(state: etc.TrainState, blocks: list[Any]) -> None:
    one, other = (state.optimizer.state[block.up.weight]["exp_avg"] for block in blocks[:2])
    one.data, other.data = other.data, one.data


def load_moments(state: etc.TrainState, blocks: list[Any]) -> None:
    """All of the optimizer's tensors are new ones, and twice as large."""
    saved = state.optimizer.state_dict()
    for moments in saved["state"].values():
        moments["exp_avg"] = moments["exp_avg"] * 2
    state.optimizer.load_state_dict(saved)


def new_memory(state: etc.TrainState, blocks: list[Any]) -> None:
    """Transposed, inside a larger one, and where all elements are one."""
    blocks[0].up.weight.data = (blocks[0].up.weight.data * 3).t().contiguous().t()
    blocks[0].up.bias.data = torch.linspace(-1, 1, 100)[7 : 7 + len(blocks[0].up.bias)]
    blocks[0].scale.data = torch.linspace(0.4, 0.6, 20)[:8]
    blocks[0].last_scale.data = blocks[0].scale.data[-1:]


def new_parameter(state: etc.TrainState, blocks: list[Any]) -> None:
    """Another object in the module and in the optimizer."""
    old = blocks[0].down.bias
    blocks[0].down.bias = new = nn.Parameter(old.detach() + 1)
    for group in state.optimizer.param_groups:
        group["params"] = [new if param is old else param for param in group["params"]]
    state.optimizer.state[new] = state.optimizer.state.pop(old)


def freeze(state: etc.TrainState, blocks: list[Any]) -> None:
    """For one step's values alone: its moments stay."""
    blocks[0].up.weight.requires_grad_(False)
    exchange_moments(state, blocks)
    blocks[0].up.weight.requires_grad_(True)


def new_buffer(state: etc.TrainState, blocks: list[Any]) -> None:
    blocks[0].register_buffer("late", torch.ones(3))


KINDS = {
    each.__name__: each
    for each in (
        exchange_weights, exchange_moments, load_moments, new_memory, new_parameter, freeze, new_buffer
    )
}


def rebind(state: etc.TrainState, kinds: str) -> None:
    for kind in kinds.split():
        KINDS[kind](state, list(state.model.layers.values()))
