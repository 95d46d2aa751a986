"""Optimizer state before the first step: made on the meta device, without stepping the real optimizer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from etc_agent.integrations.aliases import local_tensor
from etc_agent.integrations.probe import ParamState, initial_values, structure_beside_dtensor, structure_of
from etc_agent.integrations.tensors import optimizer_parameters
from etc_agent.integrations.train_state import TrainState


def create_optimizer_state(state: TrainState, names: Collection[str] | None = None) -> None:
    """Give the optimizer the state that its first step would create, without values: meta tensors, and DTensors of the
    parameter's placements where the local shape is the parameter's. Scalars that the optimizer keeps on the host
    (``step``) and Python values are real.

    `names`: of the parameters to do it for, by default all that require gradients. Those that have state are left.
    Nothing process-wide is touched, so this can run beside training (`probe`).

    Raises:
        EtcError: the optimizer cannot step over zero gradients alone.
    """
    if state.optimizer is None:
        return
    known: dict[tuple[Any, ...], ParamState] = {}
    groups = {id(param): group for group in state.optimizer.param_groups for param in group["params"]}
    for name, param in optimizer_parameters(state.model, state.optimizer).items():
        is_wanted = param.requires_grad if names is None else name in names
        if not is_wanted or state.optimizer.state.get(param):
            continue
        group, local = groups[id(param)], local_tensor(param)
        key = (id(group), tuple(local.shape), local.dtype)
        if key not in known:
            known[key] = structure_of(state.optimizer, group, local)
        structure = known[key]
        if isinstance(param, DTensor) and not all(_fits(value, local) for value in structure.values()):
            structure = structure_beside_dtensor(state.optimizer, group, param) or structure
        on_device = bool(group.get("fused") or group.get("capturable"))
        state.optimizer.state[param] = {
            entry: _like_param(value, param, on_device) for entry, value in structure.items()
        }


def reset_optimizer_state(state: TrainState) -> set[str]:
    """Fill materialised optimizer state with the values that it has before the first step (mostly zeros).

    Returns the names of the parameters for which these are not known: they depend on the parameter's or its gradient's
    values or on its size, or are Python values. Their tensors are left as they are.
    """
    if state.optimizer is None:
        return set()
    optimizer = state.optimizer
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    known: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
    unknown = set()
    for name, param in optimizer_parameters(state.model, optimizer).items():
        entries = optimizer.state.get(param)
        if not entries:
            continue
        group = groups[id(param)]
        key = (id(group), param.dim(), param.dtype)
        if key not in known:
            known[key] = initial_values(optimizer, group, param.dim(), param.dtype)
        initial = known[key]
        if entries.keys() != initial.keys() or not all(_alike(entries[entry], initial[entry]) for entry in initial):
            unknown.add(name)
            continue
        for entry, value in entries.items():
            local_tensor(value).fill_(initial[entry].flatten()[0].item())
    return unknown


def _fits(value: Any, local: torch.Tensor) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == local.shape


def _alike(value: Any, other: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == other.dtype and value.dim() == other.dim()


def _like_param(value: Any, param: torch.Tensor, on_device: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        return as_dtensor(torch.empty_like(local_tensor(value), device="meta"), value)
    if value.dim() == 0 and param.dim() > 0:
        return torch.empty_like(value, device="meta") if on_device else value.clone()
    if isinstance(param, DTensor) and value.shape == local_tensor(param).shape:
        return as_dtensor(torch.empty_like(value), param)
    # Of its own: the probe's state serves every parameter of one shape.
    return value.clone()


def as_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """`local` as the local part of a DTensor with the shape, mesh and placements of `like`."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
