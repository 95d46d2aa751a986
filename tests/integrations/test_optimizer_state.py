"""Optimizer state made by a probe, against what a real first step makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from etc_agent.errors import EtcError
from etc_agent.integrations.native import TrainState, create_optimizer_state, start_values

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "Adam maximize": lambda params: torch.optim.Adam(params, maximize=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.3),
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.LayerNorm(4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_meta(name: str) -> TrainState:
    with torch.device("meta"):
        model = net()
        state = TrainState(model, OPTIMIZERS[name](model.parameters()))
    create_optimizer_state(state)
    return state


def structure(state: dict[str, Any]) -> dict[str, Any]:
    return {key: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for key, v in state.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_probed_state_has_the_structure_of_a_real_first_steps(name: str) -> None:
    real = net()
    optimizer = OPTIMIZERS[name](real.parameters())
    train(real, optimizer, 1)
    state = on_meta(name)
    for (fqn, param), expected in zip(state.model.named_parameters(), real.parameters(), strict=True):
        assert structure(state.optimizer.state[param]) == structure(optimizer.state[expected]), fqn


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_from_initialised_state_equals_training_from_none_bit_for_bit(name: str) -> None:
    torch.manual_seed(3)
    real = net()
    weights = copy.deepcopy(real.state_dict())
    optimizer = OPTIMIZERS[name](real.parameters())
    train(real, optimizer, 3)

    state = on_meta(name)
    state.init = lambda fresh: fresh.model.load_state_dict(weights)
    start_values(state, torch.device("cpu"), None)
    train(state.model, state.optimizer, 3)
    for (fqn, param), expected in zip(state.model.named_parameters(), real.parameters(), strict=True):
        assert torch.equal(param, expected), fqn
        for key, value in optimizer.state[expected].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(state.optimizer.state[param][key], value), f"{fqn}.{key}"


def test_parameters_of_equal_shape_have_state_of_their_own() -> None:
    state = on_meta("AdamW")
    tensors = [id(value) for entry in state.optimizer.state.values() for value in entry.values()]
    assert len(tensors) == len(set(tensors))


def test_frozen_parameters_get_no_state() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    state = TrainState(model, torch.optim.AdamW(model.parameters()))
    create_optimizer_state(state)
    assert model[0].weight not in state.optimizer.state
    assert "exp_avg" in state.optimizer.state[model[0].bias]


def test_the_probe_touches_neither_random_streams_nor_weights_nor_hooks_nor_a_schedulers_count() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), scheduler.state_dict(), str(optimizer)
    create_optimizer_state(TrainState(model, optimizer, scheduler))
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before[0].items())
    assert (scheduler.state_dict(), str(optimizer)) == before[2:]
    assert not calls
    assert all(param.grad is None for param in model.parameters())


def test_an_optimizer_that_cannot_be_probed_is_refused_in_one_line() -> None:
    model = net()
    with pytest.raises(EtcError, match=r"^LBFGS cannot step over a zero gradient .*$"):
        create_optimizer_state(TrainState(model, torch.optim.LBFGS(model.parameters())))
