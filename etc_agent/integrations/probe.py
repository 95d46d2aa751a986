"""The state that an optimizer creates for a parameter, found out by letting it step over a stand-in of that parameter.

The real optimizer and its parameters are not touched, nor is anything process-wide (generators, default device, default
dtype), so this can run beside training.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from etc_agent.errors import EtcError
from etc_agent.torch_private.dtensors import local_part
from etc_agent.torch_private.optimizers import without_step_hooks

ParamState = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Probe:
    """The state of one parameter in its first step: each entry as it was first assigned, and as the step left it.
    `error`: what ended the step before its end, or None."""

    first: ParamState
    last: ParamState
    error: Exception | None


def structure_of(optimizer: Optimizer, group: dict[str, Any], local: torch.Tensor) -> ParamState:
    """The state that a plain parameter of `local`'s shape and dtype has after a step: meta tensors, but real ones
    without dimensions, and Python values.

    Raises:
        EtcError: the optimizer cannot step over a zero gradient alone.
    """
    probe = step_over(optimizer, group, torch.empty_like(local, device="meta"))
    if probe.error is not None:
        # Some optimizers (ASGD, Adafactor) read a norm back to the host, which needs a real tensor.
        probe = step_over(optimizer, group, torch.zeros(local.shape, dtype=local.dtype, device="cpu"))
        _raise(optimizer, probe)
    return {key: _kind_of(probe.first[key], value) for key, value in probe.last.items()}


def structure_beside_dtensor(optimizer: Optimizer, group: dict[str, Any], param: DTensor) -> ParamState:
    """As `structure_of`, for a sharded parameter whose state is not all of the parameter's shape: DTensors of any
    placements, where the optimizer makes such. Empty where it does not get so far."""
    local = torch.empty_like(local_part(param), device="meta")
    like = DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    probe = step_over(optimizer, group, like)
    return {key: _kind_of(probe.first[key], value) for key, value in probe.last.items()}


def initial_values(
    optimizer: Optimizer, group: dict[str, Any], num_dims: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The state before the first step of a small parameter of so many dimensions. Entries that are not one number
    throughout, or depend on the parameter's or the gradient's values, are left out."""
    values = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))
    probes = [
        step_over(optimizer, group, torch.full((2,) * num_dims, value, dtype=dtype, device="cpu"), gradient)
        for value, gradient in values
    ]
    if any(probe.error for probe in probes):
        return {}
    found = {}
    for key, value in probes[0].first.items():
        seen = [probe.first.get(key) for probe in probes]
        if isinstance(value, torch.Tensor) and len({number for each in seen for number in _numbers(each)}) == 1:
            found[key] = value
    return found


def _numbers(value: Any) -> list[Any]:
    return value.flatten().tolist() if isinstance(value, torch.Tensor) else [None]


def step_over(optimizer: Optimizer, group: dict[str, Any], param: torch.Tensor, gradient: float = 0.0) -> Probe:
    """A step of `optimizer` over `param` alone, whose gradient has the same number everywhere."""
    param = param.requires_grad_()
    param.grad = torch.full_like(param, gradient)
    probe = copy.copy(optimizer)
    probe.state = defaultdict(_FirstValues)
    probe.param_groups = [{**group, "params": [param]}]
    for option in ("foreach", "fused", "capturable"):
        if option in group:
            probe.param_groups[0][option] = False
    for key, value in group.items():
        if isinstance(value, torch.Tensor):
            # A step may write to it, or read it back to the host, which is impossible for a meta tensor.
            probe.param_groups[0][key] = 1e-3 if value.device.type == "meta" else value.item()
    without_step_hooks(probe)
    set_mode = getattr(type(optimizer), "train", None)
    if callable(set_mode):
        set_mode(probe)  # those that average weights (ScheduleFree) step in this mode alone
    # The class's step: a scheduler replaces the instance's own by one that is bound to the real optimizer.
    step: Callable[[Optimizer], Any] = type(optimizer).step
    error = None
    try:
        step(probe)
    except Exception as caught:
        error = caught
    recorded = probe.state[param]
    if isinstance(recorded, _FirstValues):
        return Probe(recorded.first, dict(recorded), error)
    return Probe({}, {}, error or _Replaced())


class _Replaced(Exception):
    """The optimizer put a dict of its own in the place of a parameter's state."""


class _FirstValues(dict[str, Any]):
    """State of one probed parameter that remembers each tensor as it was when first assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.first: ParamState = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.clone() if isinstance(value, torch.Tensor) else value
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **entries: Any) -> None:
        for key, value in dict(*others, **entries).items():
            self[key] = value


def _raise(optimizer: Optimizer, probe: Probe) -> None:
    kind = type(optimizer).__name__
    if isinstance(probe.error, _Replaced):
        raise EtcError(
            f"{kind} replaces its state instead of filling it; its state cannot be prepared, "
            "write to optimizer.state[param][key]"
        )
    if probe.error is not None:
        raise EtcError(
            f"{kind} cannot step over a zero gradient ({probe.error}); "
            "its state cannot be prepared, use an optimizer whose state depends on shapes alone"
        ) from probe.error


def _kind_of(first: Any, last: Any) -> Any:
    """What stands for an entry: of the kind that it has after the step, and before it as far as it has a value."""
    if not isinstance(last, torch.Tensor):
        return last if isinstance(first, torch.Tensor) else first
    if last.dim():
        return last.detach() if last.device.type == "meta" else last.detach().to("meta")
    return first if isinstance(first, torch.Tensor) and first.dtype == last.dtype and not first.dim() else last.detach()
