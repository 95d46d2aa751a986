"""Lets Megatron-Core train on a machine without a GPU: what it asks of CUDA is done on the CPU. Import it first.

For tests and for trying the examples out; where there is a GPU it does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _names_a_gpu(device: Any) -> bool:
    return isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> torch.Tensor:
        if _names_a_gpu(options.get("device")):
            options["device"] = "cpu"
        return make(*args, **options)

    return made


class _Stream:
    """Takes every call: work on a CPU is done when the call returns."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


def _stand_in() -> None:
    for name in ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    type_of = torch.Tensor.type

    def type_on_gpu(tensor: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        # Megatron's optimizers compare with names such as torch.cuda.FloatTensor.
        if dtype is None:
            return type_of(tensor).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.", 1)
        return type_of(tensor, dtype, *args, **options)

    torch.Tensor.type = type_on_gpu  # type: ignore[method-assign]
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **options: self  # type: ignore
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args: None
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **options: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)

    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)


if not torch.cuda.is_available():
    _stand_in()
