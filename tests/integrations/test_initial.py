"""A job's first values: what `init` did not write is refused by name, what it wrote in any way counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from etc_agent.errors import EtcError
from etc_agent.integrations.native import TrainState, create_optimizer_state, start_values, whole_model

CPU = torch.device("cpu")


class Net(nn.Module):
    """What is lost on meta: a norm's ones, frequencies, a mask. `apart` belongs to no module that can reset itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.apart = nn.Parameter(torch.full((2,), 7.0))
        self.register_buffer("frequencies", 1.0 / torch.arange(1.0, 5.0), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("nothing", torch.empty(0))


def on_meta(init: Any, model: Callable[[], nn.Module] = Net) -> TrainState:
    with torch.device("meta"):
        module = model()
        state = TrainState(module, torch.optim.AdamW(module.parameters()), init=init)
    create_optimizer_state(state)
    return state


def started(init: Any, model: Callable[[], nn.Module] = Net) -> TrainState:
    state = on_meta(init, model)
    start_values(state, CPU, None)
    return state


def reset_what_can(state: TrainState) -> None:
    for module in state.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def test_what_init_left_alone_is_refused_by_name_with_the_remedy() -> None:
    with pytest.raises(EtcError) as caught:
        started(reset_what_can)
    assert str(caught.value).startswith(
        "model.apart, model.frequencies, model.mask, model.count have no value at the job's start: "
        "TrainState.init did not write all of it"
    )
    assert 'init="module"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_state_without_init_is_refused_too() -> None:
    with pytest.raises(EtcError, match=r"^model\.apart, .* have no value .* TrainState was given no init"):
        started(None)


def written_by(name: str, state: TrainState, source: nn.Module) -> None:
    tensors = {**dict(state.model.named_parameters()), **dict(state.model.named_buffers())}
    values = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    for key, tensor in tensors.items():
        value = values[key].detach()
        if name == "copy_":
            tensor.copy_(value)
        elif name == ".data":
            tensor.data.copy_(value)
        elif name == "numpy":
            tensor.detach().numpy()[...] = value.numpy()
        elif name == "zeros":
            tensor.zero_()


@pytest.mark.parametrize("way", ["copy_", ".data", "numpy", "zeros"])
def test_a_tensor_counts_as_written_however_it_was_and_whatever_the_value(way: str) -> None:
    source = Net()
    state = started(lambda fresh: written_by(way, fresh, source))
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name] if way != "zeros" else torch.zeros_like(tensor)), name


def test_load_state_dict_writes_what_it_has_and_the_rest_is_refused() -> None:
    weights = Net().state_dict()
    with pytest.raises(EtcError, match=r"^model\.frequencies has no value"):
        started(lambda state: state.model.load_state_dict(weights))
    with pytest.raises(EtcError, match=r"^model\.frequencies has no value"):
        started(lambda state: state.model.load_state_dict(weights, strict=False))


def test_a_tensor_that_is_written_in_part_is_refused() -> None:
    def write(state: TrainState) -> None:
        written_by("copy_", state, Net())
        state.model.frequencies.fill_(float("nan"))
        with torch.no_grad():
            state.model.linear.weight.copy_(Net().linear.weight)

    started(write)

    def write_less(state: TrainState) -> None:
        fresh = state.model.linear.weight
        unwritten = fresh[2].clone()
        write(state)
        fresh[2] = unwritten

    with pytest.raises(EtcError, match=r"^model\.linear\.weight has no value"):
        started(write_less)


def test_arithmetic_on_a_tensor_without_a_value_gives_it_none() -> None:
    def write(state: TrainState) -> None:
        unwritten = state.model.apart.clone()
        written_by("copy_", state, Net())
        state.model.apart.copy_(unwritten)
        state.model.apart.mul_(0.02).add_(1.0)

    with pytest.raises(EtcError, match=r"^model\.apart has no value"):
        started(write)


class EveryType(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for dtype in (
            torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float64,
            torch.complex64, torch.complex128, torch.float8_e4m3fn,
        ):
            self.register_buffer(f"as_{dtype}".replace("torch.", ""), torch.empty((2, 3), dtype=dtype).T)
        self.register_buffer("bytes", torch.empty(3, dtype=torch.uint8))


def test_every_element_type_is_told_apart() -> None:
    def buffers(module: nn.Module) -> TrainState:
        return TrainState(module, None, init=lambda _: None)

    with torch.device("meta"):
        state = buffers(EveryType())
    with pytest.raises(EtcError, match=r"^model\.as_bool, model\.as_uint8, .* and 3 more have"):
        start_values(state, CPU, None)

    def write(fresh: TrainState) -> None:
        for buffer in fresh.model.buffers():
            buffer.zero_()
        fresh.model.bytes.fill_(0x7F)

    with torch.device("meta"):
        state = TrainState(EveryType(), None, init=write)
    start_values(state, CPU, None)


TORCH_MODULES: dict[str, Callable[[], nn.Module]] = {
    "Conv2d": lambda: nn.Conv2d(2, 3, 3),
    "BatchNorm2d": lambda: nn.BatchNorm2d(3),
    "Embedding": lambda: nn.Embedding(5, 4, padding_idx=1),
    "GroupNorm": lambda: nn.GroupNorm(1, 3),
    "RMSNorm": lambda: nn.RMSNorm(3),
    "LSTM": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "Bilinear": lambda: nn.Bilinear(2, 3, 4),
    "PReLU": nn.PReLU,
}


@pytest.mark.parametrize("name", TORCH_MODULES)
def test_torchs_own_modules_reset_themselves_wholly(name: str) -> None:
    started(reset_what_can, TORCH_MODULES[name])


def test_what_resets_itself_in_part_only_is_refused() -> None:
    with pytest.raises(EtcError, match=r"^model\.in_proj_weight, model\.in_proj_bias have no value"):
        started(reset_what_can, lambda: nn.MultiheadAttention(4, 2))


def test_tensors_of_another_shape_or_more_tensors_than_build_made_are_refused() -> None:
    def grow(state: TrainState) -> None:
        written_by("copy_", state, Net())
        state.model.frequencies = torch.ones(9)

    with pytest.raises(EtcError, match=r"made model\.frequencies float32 \(9,\), but build\(\) gives float32 \(4,\)"):
        started(grow)

    def add(state: TrainState) -> None:
        written_by("copy_", state, Net())
        state.model.register_buffer("more", torch.ones(1))

    with pytest.raises(EtcError, match=r"added model\.more to the model; make it in build\(\)"):
        started(add)


def test_a_buffer_that_init_replaces_by_one_of_its_kind_has_a_value() -> None:
    def replace(state: TrainState) -> None:
        written_by("copy_", state, Net())
        state.model.frequencies = torch.arange(4.0)

    assert started(replace).model.frequencies.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_whole_model_gives_every_value_and_init_may_follow() -> None:
    source = Net()
    state = on_meta("module")
    assert start_values(state, CPU, whole_model(TrainState(source, None))) == 0
    assert torch.equal(state.model.frequencies, source.frequencies)
    assert torch.equal(state.model.norm.weight, torch.ones(3))
    assert state.model.apart.tolist() == [7.0, 7.0]
    assert all(value.item() == 0 for value in state.optimizer.state[state.model.apart].values() if value.dim() == 0)

    state = on_meta(("module", lambda fresh: fresh.model.count.fill_(3) and 5))
    assert start_values(state, CPU, whole_model(TrainState(Net(), None))) == 5
    assert state.model.count == 3


def test_a_model_that_differs_from_the_whole_one_is_refused_by_name() -> None:
    other = Net()
    del other.mask
    with pytest.raises(EtcError, match=r"^model\.mask has no value.*for one rank alone"):
        start_values(on_meta("module"), CPU, whole_model(TrainState(other, None)))
    other = copy.deepcopy(Net())
    other.apart = nn.Parameter(torch.ones(5))
    with pytest.raises(EtcError, match=r"^model\.apart is torch\.float32 \(2,\) here and torch\.float32 \(5,\)"):
        start_values(on_meta("module"), CPU, whole_model(TrainState(other, None)))


@pytest.mark.parametrize("init", [3, (), (print, "module"), ("module", 3)])
def test_an_init_of_another_kind_is_refused(init: Any) -> None:
    with pytest.raises(EtcError, match=r"^TrainState\.init is .*; give a function of the TrainState"):
        TrainState(Net(), None, init=init)
