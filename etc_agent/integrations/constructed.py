"""Building a module for its buffers alone: their values are computed, and parameters take no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter

from etc_agent.torch_private.tensors import make_subclass


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the context, every parameter that a module in this process registers is moved to the meta device."""
    handle = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        handle.remove()


def _to_meta(module: nn.Module, name: str, param: torch.Tensor | None) -> torch.Tensor | None:
    if param is None or param.device.type == "meta" or isinstance(param, UninitializedParameter):
        return None
    meta = make_subclass(type(param), param.detach().to("meta"), param.requires_grad)
    vars(meta).update(vars(param))
    return meta
