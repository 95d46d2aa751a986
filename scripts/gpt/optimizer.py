"""AdamW over DTensor parameters without DTensor operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates the local part of each DTensor parameter.

    The update is elementwise, so the result is the same, and DTensor's dispatcher, whose cache is empty in each new
    generation, is left out of the step.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        groups, states = self.param_groups, self.state
        if not any(isinstance(param, DTensor) for group in groups for param in group["params"]):
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        locals_of = {
            param: _with_gradient(param) for group in groups for param in group["params"] if param.grad is not None
        }
        self.param_groups = [
            {**group, "params": [locals_of[param] for param in group["params"] if param in locals_of]}
            for group in groups
        ]
        self.state = defaultdict(dict, {
            local: {key: _local(value) for key, value in states[param].items()}
            for param, local in locals_of.items() if states[param]
        })
        try:
            super().step()
            for param, local in locals_of.items():
                if not states[param]:
                    states[param] = {key: _like(value, param) for key, value in self.state[local].items()}
        finally:
            self.param_groups, self.state = groups, states
        return loss


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _with_gradient(param: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return param
    local = param.to_local().detach()
    local.grad = _local(param.grad)
    return local


def _like(value: Any, param: torch.Tensor) -> Any:
    if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor) or value.dim() < param.dim():
        return value
    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
