"""Building beside training without drawing random numbers: the generators belong to training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

_FILLS: Final = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    )
)
_MAKERS: Final[dict[Callable[..., Any], Callable[..., Any]]] = {
    torch.rand: torch.zeros, torch.randn: torch.zeros,
    torch.rand_like: torch.zeros_like, torch.randn_like: torch.zeros_like,
}


class WithoutDraws(TorchFunctionMode):
    """In this thread, random fills leave tensors as they are, and random tensors are zeros: in a generation that is
    built beside training, every value arrives by migration."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _FILLS:
            return args[0]
        if func in _MAKERS:
            options.pop("generator", None)
            return _MAKERS[func](*args, **options)
        if func is torch.nn.init.trunc_normal_:
            return args[0] if args else options["tensor"]
        return func(*args, **options)


class OnMeta(TorchFunctionMode):
    """In this thread, new tensors are on the meta device whatever device is asked for, and say that they are on a GPU,
    as Megatron's optimizers demand. For a layout that is derived without memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not options:
            return f"torch.cuda.{_TYPES.get(args[0].dtype, 'Float')}Tensor"
        if func in _ON_DEVICES or options.get("device") is not None:
            options["device"] = "meta"
            options.pop("pin_memory", None)
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        return func(*args, **options)


_TYPES: Final = {torch.bfloat16: "BFloat16", torch.float16: "Half", torch.float32: "Float"}
_ON_DEVICES: Final = frozenset(
    getattr(torch, name)
    for name in (
        "arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros",
    )
)
