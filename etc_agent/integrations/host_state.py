"""The parts of a training state that are not tensors: schedule, scaler, hyperparameters, extras; and random streams."""

from __future__ import annotations

from typing import Any, Final

import torch

from etc_agent.errors import EtcError, named
from etc_agent.integrations.json_values import Json, decode, encode
from etc_agent.integrations.train_state import Stateful, TrainState

_OF_PARAMETERS: Final = ("params", "param_names")
"""The entries of a parameter group that list its parameters, which differ between pipeline stages."""


def host_state(state: TrainState) -> dict[str, Json]:
    """Everything of `state` that is not a tensor, as a JSON-able dict: equal on every rank, so one rank's is enough.

    Raises:
        EtcError: a value cannot be written as JSON; the message names its key.
    """
    groups = state.optimizer.param_groups if state.optimizer is not None else []
    hyperparameters = [{key: value for key, value in group.items() if key not in _OF_PARAMETERS} for group in groups]
    return {
        "kinds": _kinds(state),
        "optimizer": encode(_own_entries(state), "optimizer.state"),
        "scheduler": encode(state.scheduler.state_dict() if state.scheduler is not None else None, "scheduler"),
        "scaler": encode(state.scaler.state_dict() if state.scaler is not None else None, "scaler"),
        "param_groups": encode(hyperparameters, "param_groups"),
        "extras": encode({name: extra.state_dict() for name, extra in _replicated(state).items()}, "extras"),
    }


def load_host_state(state: TrainState, value: dict[str, Json]) -> None:
    """Put what `host_state` returned, also after a trip through JSON, into a state of another generation.

    Raises:
        EtcError: the two generations' states differ in kind (a scheduler only in one, another number of groups ...).
    """
    carried = {key: decode(item) for key, item in value.items() if key != "kinds"}
    made = _kinds(state)
    for name, kind in value["kinds"].items():
        if None not in (kind, made[name]) and kind != made[name]:
            raise EtcError(
                f"the {name} is a {kind} where the state comes from, and build() made a {made[name]}; "
                "build() must make the same one that the script uses, in every generation"
            )
    groups = state.optimizer.param_groups if state.optimizer is not None else []
    if len(carried["param_groups"]) != len(groups):
        raise EtcError(
            f"the optimizer has {len(groups)} parameter groups here and {len(carried['param_groups'])} where the state "
            "comes from; build() must make the same groups in every generation and on every rank"
        )
    extras = _replicated(state)
    if set(carried["extras"]) != set(extras):
        raise EtcError(
            f"extras are {sorted(extras)} here and {sorted(carried['extras'])} where the state comes from; "
            "build() must name the same extras in every generation"
        )
    for name, target in (("scheduler", state.scheduler), ("scaler", state.scaler)):
        if (target is None) != (carried[name] is None):
            raise EtcError(f"build() must make a {name} in every generation and on every rank, or in none")
        if target is not None:
            target.load_state_dict(carried[name])
    for name, extra in extras.items():
        load_extra(name, extra, carried["extras"][name])
    for key, value in carried["optimizer"].items():
        assert state.optimizer is not None
        state.optimizer.state[key] = value
    # Last: loading a scheduler may overwrite learning rates, and the carried ones are the right ones.
    for group, hyperparameters in zip(groups, carried["param_groups"], strict=True):
        for key, hyperparameter in hyperparameters.items():
            _set(group, key, hyperparameter)


def _kinds(state: TrainState) -> dict[str, str | None]:
    """The classes of what has a `state_dict` that another class would take without a word."""
    found = {"optimizer": state.optimizer, "scheduler": state.scheduler, "scaler": state.scaler}
    return {name: None if each is None else type(each).__qualname__ for name, each in found.items()}


def load_extra(name: str, extra: Stateful, carried: Any) -> None:
    """`extra.load_state_dict`, with an error that names it."""
    try:
        extra.load_state_dict(carried)
    except Exception as error:
        raise EtcError(f"load_state_dict() of extras[{name!r}] raised {named(error)}") from error


def _own_entries(state: TrainState) -> dict[Any, Any]:
    """Optimizer state that belongs to no parameter, such as a count of its own."""
    entries = state.optimizer.state if state.optimizer is not None else {}
    return {key: value for key, value in entries.items() if not isinstance(key, torch.Tensor)}


def _replicated(state: TrainState) -> dict[str, Stateful]:
    """The extras that are equal on every rank: those that declare no other rule."""
    return {
        name: extra for name, extra in state.extras.items() if getattr(extra, "rule", "replicated") == "replicated"
    }


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of torch's generators that training on `device` draws from: the CPU's, then the device's own.

    Returns a 1-dim uint8 tensor on the CPU, of one length for one kind of device.
    """
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def set_rng_state(device: torch.device, value: torch.Tensor) -> None:
    """Restore what `rng_state` returned."""
    num_host_bytes = len(torch.get_rng_state())
    torch.set_rng_state(value[:num_host_bytes])
    if device.type == "cuda":
        torch.cuda.set_rng_state(value[num_host_bytes:], device)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Tensor hyperparameters (a capturable learning rate) keep their identity, since compiled steps refer to them."""
    if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
        group[key].copy_(value)
    else:
        group[key] = value
