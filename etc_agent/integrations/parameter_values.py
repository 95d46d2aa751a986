"""Optimizer state that is not tensors: the Python numbers and strings that some optimizers keep for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from etc_agent.errors import EtcError
from etc_agent.integrations.json_values import Json, decode, encode
from etc_agent.integrations.tensors import optimizer_parameters
from etc_agent.integrations.train_state import TrainState

ParameterValues = dict[str, dict[str, Json]]
"""Parameter -> key of its optimizer state -> the encoded value."""


def has_parameter_values(state: TrainState) -> bool:
    """Whether the optimizer keeps such values for any of this rank's parameters."""
    entries = state.optimizer.state.values() if state.optimizer is not None else ()
    return any(_is_value(value) for entry in entries if isinstance(entry, dict) for value in entry.values())


def parameter_values(state: TrainState) -> ParameterValues:
    """The values of this rank's parameters, as JSON; those without any are left out. None is not a value.

    Raises:
        EtcError: a value cannot be written as JSON; the message names it.
    """
    if state.optimizer is None:
        return {}
    found = {}
    for name, param in optimizer_parameters(state.model, state.optimizer).items():
        entries = state.optimizer.state.get(param, {})
        values = {
            key: encode(value, f"optimizer.{name}.{key}") for key, value in entries.items() if _is_value(value)
        }
        if values:
            found[name] = values
    return found


def load_parameter_values(state: TrainState, gathered: Sequence[ParameterValues]) -> None:
    """Give this rank's parameters their values; `gathered` has what each rank of the previous generation said.

    Raises:
        EtcError: two ranks contradict each other, or none has said what this rank needs; the message names it.
    """
    if state.optimizer is None:
        return
    merged: ParameterValues = {}
    for said in gathered:
        for name, values in said.items():
            if merged.setdefault(name, values) != values:
                raise EtcError(
                    f"optimizer state of {name} is {_shown(merged[name])} on one rank and {_shown(values)} on another; "
                    "values that differ between the ranks of one parameter cannot be carried, keep them in a tensor"
                )
    for name, param in optimizer_parameters(state.model, state.optimizer).items():
        entries = state.optimizer.state.get(param, {})
        wanted = {key for key, value in entries.items() if _is_value(value)}
        given = {key: decode(value) for key, value in merged.get(name, {}).items()}
        if wanted != given.keys():
            differing = ", ".join(sorted(f"optimizer.{name}.{key}" for key in wanted ^ given.keys()))
            raise EtcError(
                f"{differing}: a Python value in one generation and not in the other; "
                "an optimizer must keep state of one kind under one key"
            )
        entries.update(given)


def _is_value(value: Any) -> bool:
    return value is not None and not isinstance(value, torch.Tensor)


def _shown(values: dict[str, Json]) -> str:
    return ", ".join(f"{key}={decode(value)!r}" for key, value in values.items())
