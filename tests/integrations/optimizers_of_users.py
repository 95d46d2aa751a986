"""Optimizers as users write them, each with a kind of state that torch's own do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                first, second = group["betas"]
                update = state["exp_avg"].mul(first).add(param.grad, alpha=1 - first).sign()
                param.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(second).add_(param.grad, alpha=1 - second)


class NumbersPerParameter(Optimizer):
    """Like transformers' Adafactor: a Python count, a norm that begins as the number 0, rows and columns."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, square = self.state[param], param.grad.square() + 1e-30
                if not state:
                    state["step"], state["norm"], state["scale"] = 0, 0, 1.0
                    if param.dim() > 1:
                        state["row"] = torch.zeros(param.shape[:-1])
                        state["column"] = torch.zeros(param.shape[:-2] + param.shape[-1:])
                    else:
                        state["whole"] = torch.zeros_like(param)
                state["step"] += 1
                state["scale"] *= 0.75
                state["norm"] = param.norm() / param.numel() ** 0.5
                decay = 1.0 - state["step"] ** -0.8
                if param.dim() > 1:
                    state["row"].mul_(decay).add_(square.mean(-1), alpha=1 - decay)
                    state["column"].mul_(decay).add_(square.mean(-2), alpha=1 - decay)
                    row = (state["row"] / state["row"].mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
                    update = row * state["column"].rsqrt().unsqueeze(-2) * param.grad
                else:
                    update = state["whole"].mul_(decay).add_(square, alpha=1 - decay).rsqrt() * param.grad
                size = group["lr"] * max(1e-3, float(state["norm"])) * (1.0 + state["scale"])
                param.add_(update, alpha=-size)


class SlowWeights(Optimizer):
    """Keeps a copy of the weights, pulled along: its first value is theirs."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["slow"] = param.clone()
                param.add_(param.grad, alpha=-group["lr"])
                state["slow"].lerp_(param, 0.5)
                if group["count"] % 2 == 0:
                    param.copy_(state["slow"])


class Quantised(Optimizer):
    """Keeps the momentum of large parameters in bytes with a scale and a table, that of small ones as it is."""

    def __init__(self, params: Any, lr: float = 1e-2, large: int = 10) -> None:
        super().__init__(params, {"lr": lr, "large": large})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                is_large = param.numel() >= group["large"]
                if not state and is_large:
                    state["momentum"] = torch.full_like(param, 128, dtype=torch.uint8)
                    state["table"] = torch.linspace(-1, 1, 256, device=param.device)
                    state["scale"] = torch.zeros(1, device=param.device)
                elif not state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"]
                if is_large:
                    momentum = state["table"][momentum.long()] * state["scale"]
                momentum = momentum * 0.9 + param.grad
                param.add_(momentum, alpha=-group["lr"])
                if is_large:
                    state["scale"].copy_(momentum.abs().max().reshape(1))
                    state["momentum"].copy_(((momentum / state["scale"].clamp_min(1e-12) + 1) * 127.5).round())
                else:
                    state["momentum"] = momentum


class OnlyInTrainMode(SlowWeights):
    """Steps only after `train()`, like ScheduleFree; the mode is in the groups."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def step(self, closure: Callable[[], float] | None = None) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("not in train mode")
        super().step(closure)
