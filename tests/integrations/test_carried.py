"""A training state that goes over to another generation trains on bit for bit as one that did not change.

A change is simulated in this process: the next state is built on the meta device, amended, filled from the shards of
the old one by name, and given what goes over as JSON.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers_of_users import Lion, NumbersPerParameter, OnlyInTrainMode, Quantised, SlowWeights
from torch import nn

from etc_agent.errors import EtcError
from etc_agent.integrations.amendments import Amendments, Built, changed_plain_numbers
from etc_agent.integrations.native import (
    TrainState,
    create_optimizer_state,
    held_shards,
    host_state,
    load_host_state,
    materialise,
    shards_of,
    start_values,
    whole_model,
)
from etc_agent.integrations.parameter_values import load_parameter_values, parameter_values

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": torch.optim.AdamW,
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2, device="cpu")),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "SGD dampening": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.5),
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "Lion": Lion,
    "numbers per parameter": NumbersPerParameter,
    "slow weights": SlowWeights,
    "quantised": Quantised,
    "only in train mode": OnlyInTrainMode,
    "NAdam": torch.optim.NAdam,
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.01),
}


def schedule_free(params: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("schedulefree").AdamWScheduleFree(params, lr=0.01, warmup_steps=2)


def adafactor_of_transformers(params: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("transformers.optimization").Adafactor(params)


LIBRARIES: dict[str, Make] = {"ScheduleFree": schedule_free, "Adafactor of transformers": adafactor_of_transformers}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


Build = Callable[[], TrainState]


def build_with(make: Make, freeze: tuple[str, ...] = (), only: str = "") -> Build:
    """`freeze`: parts that build() freezes; `only`: the part whose parameters the optimizer gets, all by default."""

    def build() -> TrainState:
        model = Net()
        for name in freeze:
            getattr(model, name).requires_grad_(False)
        return TrainState(model, make((getattr(model, only) if only else model).parameters()), init="module")

    return build


def on_meta(build: Build) -> TrainState:
    with torch.device("meta"):
        state = build()
    create_optimizer_state(state)
    state.as_built = Built.of(state)
    return state


def started(build: Build) -> TrainState:
    torch.manual_seed(3)
    whole = whole_model(TrainState(Net(), None))
    state = on_meta(build)
    start_values(state, torch.device("cpu"), whole)
    return state


def plain(build: Build) -> TrainState:
    """The same without any of our doing."""
    torch.manual_seed(3)
    return build()


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def changed(old: TrainState, build: Build) -> TrainState:
    state = on_meta(build)
    Amendments.merged([through_json(Amendments.of(old).to_json())]).apply(state)
    sources = {shard: local for shard, local in held_shards(old).items()}
    wanted = shards_of(state)
    assert wanted.keys() == sources.keys(), {shard.tensor.name for shard in wanted.keys() ^ sources.keys()}
    materialise(state, lambda placed, meta: sources[placed.shard].clone())
    for shard, local in shards_of(state).items():
        local.copy_(sources[shard])
    load_host_state(state, through_json(host_state(old)))
    load_parameter_values(state, [through_json(parameter_values(old))])
    return state


def train(state: TrainState, first: int, num_steps: int) -> None:
    for step in range(first, first + num_steps):
        generator = torch.Generator().manual_seed(step)
        state.model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        if hasattr(state.optimizer, "train"):
            state.optimizer.train()
        state.optimizer.step()
        state.model.zero_grad()


def assert_same(state: TrainState, expected: TrainState) -> None:
    others = dict(expected.model.named_parameters())
    for name, param in state.model.named_parameters():
        assert torch.equal(param, others[name]), name
        assert param.requires_grad == others[name].requires_grad, name
        entries, theirs = state.optimizer.state.get(param, {}), expected.optimizer.state.get(others[name], {})
        assert {key for key, value in entries.items() if value is not None} == {
            key for key, value in theirs.items() if value is not None
        }, name
        for key, value in theirs.items():
            assert type(entries.get(key)) is type(value), f"{name}.{key}"
            same = torch.equal(entries[key], value) if isinstance(value, torch.Tensor) else entries[key] == value
            assert same, f"{name}.{key}"
    for group, theirs in zip(state.optimizer.param_groups, expected.optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *(pytest.param(name, marks=pytest.mark.stacks) for name in LIBRARIES)])
def test_training_goes_on_bit_for_bit_after_a_change(name: str, num_steps: int) -> None:
    build = build_with((OPTIMIZERS | LIBRARIES)[name])
    state, expected = started(build), plain(build)
    for each in (state, expected):
        train(each, 0, num_steps)
    state = changed(state, build)
    for each in (state, expected):
        train(each, num_steps, 3)
    assert_same(state, expected)


@pytest.mark.stacks
def test_weights_that_are_averaged_for_an_evaluation_are_so_after_a_change() -> None:
    build = build_with(schedule_free)
    state, expected = started(build), plain(build)
    for each in (state, expected):
        train(each, 0, 3)
        each.optimizer.eval()
    state = changed(state, build)
    assert_same(state, expected)
    for each in (state, expected):
        train(each, 3, 2)
    assert_same(state, expected)


Script = Callable[[TrainState], None]


def freeze_head(state: TrainState) -> None:
    state.model.head.requires_grad_(False)


def unfreeze_body(state: TrainState) -> None:
    state.model.body.requires_grad_(True)


@pytest.mark.parametrize("later", [0, 1, 2])
@pytest.mark.parametrize("name", ["AdamW", "SGD dampening", "Adafactor", "numbers per parameter", "slow weights"])
@pytest.mark.parametrize(
    ("built_frozen", "script"), [((), freeze_head), (("body",), unfreeze_body)], ids=["frozen", "unfrozen"]
)
def test_what_the_script_has_frozen_or_unfrozen_stays_so_with_its_moments(
    built_frozen: tuple[str, ...], script: Script, name: str, later: int
) -> None:
    build = build_with(OPTIMIZERS[name], freeze=built_frozen)
    state, expected = started(build), plain(build)
    for each in (state, expected):
        train(each, 0, 2)
        script(each)
        train(each, 2, later)
    for _ in range(2):
        state = changed(state, build)
    for each in (state, expected):
        train(each, 2 + later, 2)
        # And back: what build() made the other way keeps its moments too.
        for param in (*each.model.body.parameters(), *each.model.head.parameters()):
            param.requires_grad_(True)
    state = changed(state, build)
    for each in (state, expected):
        train(each, 4 + later, 2)
    assert_same(state, expected)


@pytest.mark.parametrize("later", [0, 2])
def test_a_group_that_the_script_has_added_is_carried_with_its_learning_rate_and_moments(later: int) -> None:
    build = build_with(torch.optim.AdamW, only="head")
    state, expected = started(build), plain(build)
    for each in (state, expected):
        train(each, 0, 2)
        each.optimizer.add_param_group({"params": list(each.model.body.parameters()), "lr": 1 / 3, "betas": (0.5, 0.6)})
        train(each, 2, later)
        each.optimizer.param_groups[0]["lr"] = 0.125
    state = changed(changed(state, build), build)
    for each in (state, expected):
        train(each, 2 + later, 3)
    assert_same(state, expected)
    assert state.optimizer.param_groups[1]["lr"] == 1 / 3


def test_groups_that_were_changed_otherwise_are_refused_by_name() -> None:
    state = started(build_with(torch.optim.AdamW))
    state.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(EtcError, match=r"changed the parameters in group 0 of the optimizer.*add_param_group"):
        Amendments.of(state)


def test_the_mode_of_a_module_is_carried() -> None:
    build = build_with(torch.optim.AdamW)
    state = started(build)
    state.model.norm.eval()
    assert not changed(state, build).model.norm.training
    assert changed(state, build).model.body.training


def test_names_of_parameters_in_groups_are_not_carried_to_other_stages() -> None:
    def build() -> TrainState:
        model = Net()
        return TrainState(model, torch.optim.AdamW(model.named_parameters()))

    def build_stage() -> TrainState:
        stage = nn.ModuleDict({"head": nn.Linear(4, 2)})
        return TrainState(stage, torch.optim.AdamW(stage.named_parameters()))

    stage = build_stage()
    load_host_state(stage, through_json(host_state(build())))
    assert stage.optimizer.param_groups[0]["param_names"] == ["head.weight", "head.bias"]


def test_state_of_the_optimizer_that_belongs_to_no_parameter_is_carried() -> None:
    build = build_with(torch.optim.AdamW)
    state = started(build)
    state.optimizer.state["clipped"] = 7
    assert changed(state, build).optimizer.state["clipped"] == 7
    state.optimizer.state["clipped"] = {7}
    with pytest.raises(EtcError, match=r"^optimizer\.state\.clipped is a set, which cannot be carried"):
        host_state(state)


def test_ranks_that_contradict_each_other_about_a_parameter_are_refused() -> None:
    build = build_with(NumbersPerParameter)
    state = started(build)
    train(state, 0, 1)
    values = parameter_values(state)
    other = copy.deepcopy(values)
    other["head.bias"]["step"] = 5
    with pytest.raises(EtcError, match=r"^optimizer state of head\.bias is step=1, scale=0.75 on one rank and step=5"):
        load_parameter_values(changed(state, build), [values, other])
    with pytest.raises(EtcError, match=r"^head\.bias: requires_grad is False on one rank and True on another"):
        Amendments.merged([{"trainable": {"head.bias": True}}, {"trainable": {"head.bias": False}}])


def test_values_that_only_one_generation_has_are_refused_by_name() -> None:
    state = started(build_with(NumbersPerParameter))
    train(state, 0, 1)
    values = parameter_values(state)
    del values["head.bias"]
    with pytest.raises(EtcError, match=r"^optimizer\.head\.bias\.scale, optimizer\.head\.bias\.step: a Python value"):
        load_parameter_values(changed(state, build_with(NumbersPerParameter)), [values])


def test_a_change_of_the_script_after_the_preparation_is_noticed() -> None:
    state = started(build_with(torch.optim.AdamW))
    prepared = Amendments.of(state)
    prepared.check_same(Amendments.of(state))
    freeze_head(state)
    with pytest.raises(EtcError, match=r"^head\.bias, head\.weight: frozen, unfrozen, .* it has to be prepared again"):
        prepared.check_same(Amendments.of(state))


def test_plain_numbers_that_have_changed_are_found_by_name() -> None:
    state = started(build_with(Lion))
    assert changed_plain_numbers(state) == {}
    state.model.body.num_updates = 3
    state.optimizer.calls = 1
    state.model.norm.eps = 0.5
    state.model.eval()
    assert changed_plain_numbers(state) == {
        "model.body.num_updates": (None, 3), "model.norm.eps": (1e-5, 0.5), "optimizer.calls": (None, 1),
    }
