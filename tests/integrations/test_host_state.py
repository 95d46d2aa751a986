"""What is not a tensor goes through JSON, exactly."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from etc_agent.errors import EtcError
from etc_agent.integrations.json_values import decode, encode
from etc_agent.integrations.native import TrainState, host_state, load_host_state, rng_state, set_rng_state

SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], gamma=0.3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.7, total_steps=20),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "chain": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[3],
    ),
}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text(), inner),
    max_leaves=10,
)


class Counter:
    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def make(scheduler: str = "lambda", num_groups: int = 2) -> TrainState:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(num_groups))
    groups = [{"params": layer.parameters(), "lr": 0.1 * (i + 1)} for i, layer in enumerate(model)]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95))
    return TrainState(model, optimizer, SCHEDULERS[scheduler](optimizer), extras={"counter": Counter()})


def advance(state: TrainState, num_steps: int) -> list[list[float]]:
    rates = []
    for step in range(num_steps):
        state.optimizer.step()
        if isinstance(state.scheduler, lr_scheduler.ReduceLROnPlateau):
            state.scheduler.step(float(step % 3))
        else:
            state.scheduler.step()
        rates.append([group["lr"] for group in state.optimizer.param_groups])
    return rates


@given(values)
def test_values_survive_json_exactly(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value, "x")))) == value


@given(st.floats(allow_nan=True))
def test_floats_survive_json_bit_for_bit(value: float) -> None:
    carried = decode(json.loads(json.dumps(encode(value, "x"))))
    assert struct.pack("d", carried) == struct.pack("d", value) or value != value


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_schedule_goes_on_as_if_it_had_not_moved(scheduler: str) -> None:
    first, second = make(scheduler), make(scheduler)
    advance(first, 5)
    first.extras["counter"].value = (3, "x")
    load_host_state(second, json.loads(json.dumps(host_state(first))))
    assert advance(second, 5) == advance(first, 5)
    assert second.extras["counter"].value == (3, "x")
    assert second.optimizer.param_groups[1]["betas"] == first.optimizer.param_groups[1]["betas"]


def test_a_learning_rate_changed_by_hand_is_carried() -> None:
    first, second = make(), make()
    first.optimizer.param_groups[1]["lr"] = 1 / 3
    load_host_state(second, json.loads(json.dumps(host_state(first))))
    assert second.optimizer.param_groups[1]["lr"] == 1 / 3


def test_a_tensor_learning_rate_keeps_its_identity() -> None:
    def with_tensor(value: float) -> TrainState:
        model = nn.Linear(2, 2)
        return TrainState(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(value)))

    first, second = with_tensor(0.25), with_tensor(0.5)
    rate = second.optimizer.param_groups[0]["lr"]
    load_host_state(second, json.loads(json.dumps(host_state(first))))
    assert second.optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25


def test_what_json_cannot_hold_is_refused_by_its_key() -> None:
    state = make()
    state.extras["counter"].value = [1, {2, 3}]
    with pytest.raises(EtcError, match=r"extras\.counter\.value\[1\] is a set"):
        host_state(state)


def test_states_of_another_kind_are_refused() -> None:
    value = host_state(make())
    with pytest.raises(EtcError, match="3 parameter groups here and 2 where"):
        load_host_state(make(num_groups=3), value)
    other = make()
    other.extras = {}
    with pytest.raises(EtcError, match="same extras"):
        load_host_state(other, value)
    other = make()
    other.scheduler = None
    with pytest.raises(EtcError, match="must make a scheduler"):
        load_host_state(other, value)


@pytest.mark.parametrize("name", ["scheduler", "optimizer"])
def test_another_class_than_build_makes_is_refused(name: str) -> None:
    state = make()
    if name == "optimizer":
        state.optimizer = torch.optim.Adam(state.optimizer.param_groups)
    else:
        state.scheduler = lr_scheduler.ExponentialLR(state.optimizer, 0.9)
    with pytest.raises(EtcError, match=rf"the {name} is a (Adam|ExponentialLR) where .* made a (AdamW|LambdaLR)"):
        load_host_state(make(), json.loads(json.dumps(host_state(state))))


@pytest.mark.parametrize("value", [np.float64(1 / 3), np.float32(0.1), np.int64(2**60), np.bool_(True), np.float16(2)])
def test_numbers_of_numpy_survive_json_in_their_own_type(value: Any) -> None:
    carried = decode(json.loads(json.dumps(encode(value, "x"))))
    assert (type(carried), carried) == (type(value), value)


def test_an_extra_that_does_not_load_is_named() -> None:
    class Strict(Counter):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise KeyError("no value")

    other = make()
    other.extras["counter"] = Strict()
    with pytest.raises(EtcError, match=r"load_state_dict\(\) of extras\['counter'\] raised KeyError: 'no value'"):
        load_host_state(other, host_state(make()))


def test_a_random_stream_goes_on_where_it_was_saved() -> None:
    device = torch.device("cpu")
    saved = rng_state(device)
    drawn = torch.rand(5)
    set_rng_state(device, saved)
    assert saved.dtype == torch.uint8
    assert torch.equal(torch.rand(5), drawn)
