"""Lets a script's `build`, on the meta device, say ``model.to(device)`` as scripts for torchrun do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class StayingOnMeta(TorchFunctionMode):
    """Within it, a meta tensor that is moved to another device stays where it is: the session moves it. A new dtype is
    given all the same."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MOVES and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func is not torch.Tensor.to:
                return args[0]
            args = (args[0], *(_META if _is_device(each) else each for each in args[1:]))
            kwargs = {**kwargs, "device": _META} if kwargs.get("device") is not None else kwargs
        return func(*args, **kwargs)


_META = torch.device("meta")
_MOVES = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | str) or (isinstance(value, int) and not isinstance(value, bool))
