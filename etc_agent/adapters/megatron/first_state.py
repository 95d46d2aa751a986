"""The state of Megatron's optimizers before their first step, so that a change finds it from the start."""

from __future__ import annotations

from typing import Any

import torch

from etc_agent.integrations.probe import ParamState, initial_values, structure_of


def create_state(part: Any) -> None:
    """Give the torch optimizer inside `part`, one of Megatron's, the state that its first step would create, with the
    values from before that step. Optimizers that only run on a GPU make it themselves (`init_state_fn`)."""
    optimizer = part.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__module__.startswith("torch.optim"):
        for group in optimizer.param_groups:
            known: dict[tuple[Any, ...], tuple[ParamState, dict[str, torch.Tensor]]] = {}
            for param in group["params"]:
                key = (tuple(param.shape), param.dtype)
                if key not in known:
                    values = initial_values(optimizer, group, param.dim(), param.dtype)
                    known[key] = structure_of(optimizer, group, param.detach()), values
                structure, values = known[key]
                if not optimizer.state.get(param):
                    optimizer.state[param] = {
                        entry: _filled(value, values.get(entry), param) for entry, value in structure.items()
                    }
    elif part.init_state_fn is not None:
        part.init_state_fn(optimizer, part.config)


def _filled(like: Any, value: torch.Tensor | None, param: torch.Tensor) -> Any:
    if not isinstance(like, torch.Tensor):
        return like
    number = value.flatten()[0].item() if value is not None else 0
    if not like.dim():
        return torch.full((), number, dtype=like.dtype, device="cpu")
    return torch.full(like.shape, number, dtype=like.dtype, device=param.device)
