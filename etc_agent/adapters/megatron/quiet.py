"""Building beside training without drawing random numbers: the generators belong to training."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
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
    unwrap(torch.rand): torch.zeros, unwrap(torch.randn): torch.zeros,
    torch.rand_like: torch.zeros_like, torch.randn_like: torch.zeros_like,
}
"""A mode is given the functions of torch itself, also where something has wrapped them."""


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
    """In this thread, new tensors of floating-point numbers are on the meta device, and say that they are on a GPU, as
    Megatron's optimizers demand. For a layout that is derived without memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not options and args[0].is_meta:
            return f"torch.cuda.{_TYPES.get(args[0].dtype, 'Float')}Tensor"
        if func is torch.Tensor.cuda and args[0].is_meta:
            return args[0]
        dtype = options.get("dtype")
        if func in _LARGE and (dtype is None or dtype.is_floating_point):
            options["device"] = "meta"
            options.pop("pin_memory", None)
        return func(*args, **options)


_TYPES: Final = {torch.bfloat16: "BFloat16", torch.float16: "Half", torch.float32: "Float"}
_LARGE: Final = frozenset(
    unwrap(make) for make in (torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.rand, torch.randn)
)
