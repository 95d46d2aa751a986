"""Optimizer state before the first step: made on the meta device, without stepping the real optimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from etc_agent.errors import EtcError
from etc_agent.integrations.aliases import local_tensor
from etc_agent.integrations.tensors import optimizer_parameters
from etc_agent.integrations.train_state import TrainState
from etc_agent.torch_private.dtensors import local_part
from etc_agent.torch_private.optimizers import without_step_hooks

ParamState = dict[str, Any]


def create_optimizer_state(state: TrainState) -> None:
    """Give the optimizer the state that its first step would create, without values: meta tensors, and DTensors of the
    parameter's placements where the local shape is the parameter's. Scalars that the optimizer keeps on the host
    (``step``) are real.

    Learned from a probe: the same optimizer class steps over plain meta tensors of the local shapes. The real optimizer
    is only given state, for the parameters that require gradients and have none yet. Nothing process-wide is touched
    (RNG, default device, default dtype), so this can run beside training.

    Raises:
        EtcError: the optimizer cannot step over zero gradients alone.
    """
    if state.optimizer is None:
        return
    known: dict[tuple[Any, ...], ParamState] = {}
    for group, param in _without_state(state):
        local = local_tensor(param)
        key = (id(group), tuple(local.shape), local.dtype)
        if key not in known:
            known[key] = _probe_structure(state.optimizer, group, local)
        on_device = bool(group.get("fused") or group.get("capturable"))
        state.optimizer.state[param] = {
            name: _like_param(value, param, on_device) for name, value in known[key].items()
        }


def reset_optimizer_state(state: TrainState) -> None:
    """Fill materialised optimizer state with the values that it has before the first step (mostly zeros).

    SGD with momentum and dampening is the one exception among torch's optimizers: it treats its very first step
    differently where no state exists.
    """
    if state.optimizer is None:
        return
    optimizer = state.optimizer
    params = optimizer_parameters(state.model, optimizer)
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    known: dict[tuple[Any, ...], ParamState] = {}
    for name, param in params.items():
        if not param.requires_grad:
            continue
        group = groups[id(param)]
        key = (id(group), param.dim(), param.dtype)
        if key not in known:
            known[key] = _probe(optimizer, group, torch.zeros((1,) * param.dim(), dtype=param.dtype, device="cpu"))
        for key_name, value in optimizer.state[param].items():
            if isinstance(value, torch.Tensor):
                initial = known[key].get(key_name)
                if initial is None:
                    raise EtcError(f"the initial value of optimizer state {name}.{key_name} is unknown")
                local_tensor(value).fill_(initial.flatten()[0].item())


def _without_state(state: TrainState) -> list[tuple[dict[str, Any], torch.Tensor]]:
    assert state.optimizer is not None
    optimizer_parameters(state.model, state.optimizer)
    return [
        (group, param)
        for group in state.optimizer.param_groups
        for param in group["params"]
        if param.requires_grad and not state.optimizer.state.get(param)
    ]


def _probe_structure(optimizer: Optimizer, group: dict[str, Any], local: torch.Tensor) -> ParamState:
    """The state of a parameter of `local`'s shape and dtype: tensors on meta, scalars real."""
    try:
        return _probe(optimizer, group, torch.empty_like(local, device="meta"))
    except EtcError:
        # Some (ASGD, Adafactor) read a norm back to the host, which only a real tensor has.
        real = _probe(optimizer, group, torch.zeros(local.shape, dtype=local.dtype, device="cpu"))
    return {
        key: value.to("meta") if isinstance(value, torch.Tensor) and value.dim() else value
        for key, value in real.items()
    }


class _FirstValues(dict[str, Any]):
    """State of one probed parameter that remembers each tensor as it was when first assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.first: ParamState = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.clone() if isinstance(value, torch.Tensor) else value
        super().__setitem__(key, value)


def _probe(optimizer: Optimizer, group: dict[str, Any], param: torch.Tensor) -> ParamState:
    """State as first assigned by a step of `optimizer` over `param` alone, with a zero gradient."""
    param = param.requires_grad_()
    param.grad = torch.zeros_like(param)
    probe = copy.copy(optimizer)
    probe.state = defaultdict(_FirstValues)
    probe.param_groups = [{**group, "params": [param]}]
    for option in ("foreach", "fused", "capturable"):
        if option in group:
            probe.param_groups[0][option] = False
    if isinstance(group.get("lr"), torch.Tensor):
        probe.param_groups[0]["lr"] = 1e-3
    without_step_hooks(probe)
    # The class's step: a scheduler replaces the instance's own by one that is bound to the real optimizer.
    step: Callable[[Optimizer], Any] = type(optimizer).step
    try:
        step(probe)
    except Exception as error:
        raise EtcError(
            f"{type(optimizer).__name__} cannot step over a zero gradient ({error}); "
            "its state cannot be prepared, use an optimizer whose state depends on shapes alone"
        ) from error
    recorded = probe.state[param]
    if not isinstance(recorded, _FirstValues):
        raise EtcError(
            f"{type(optimizer).__name__} replaces its state instead of filling it; its state cannot be prepared, "
            "write to optimizer.state[param][key]"
        )
    return recorded.first


def _like_param(value: Any, param: torch.Tensor, on_device: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 and param.dim() > 0:
        return torch.empty_like(value, device="meta") if on_device else value.clone()
    if isinstance(param, DTensor) and value.shape == local_part(param).shape:
        return as_dtensor(torch.empty_like(value), param)
    # Of its own: the probe's state serves every parameter of one shape.
    return value.clone()


def as_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """`local` as the local part of a DTensor with the shape, mesh and placements of `like`."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
