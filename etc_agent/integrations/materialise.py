"""Replaces meta tensors by real ones, in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from etc_agent.errors import EtcError
from etc_agent.integrations.aliases import aliases_of, local_tensor, view_of_owner
from etc_agent.integrations.optimizer_state import as_dtensor
from etc_agent.integrations.tensors import Placed, all_tensors, places_of
from etc_agent.integrations.train_state import TrainState
from etc_agent.torch_private.recurrent import find_weights, forget_weights
from etc_agent.torch_private.tensors import make_subclass

Provide = Callable[[Placed, torch.Tensor], torch.Tensor]
"""(tensor and its boxes, its meta local tensor) -> a real plain tensor of the same shape and dtype: new, or shared
storage."""


def materialise(state: TrainState, provide: Provide) -> None:
    """Replace every meta tensor of `state` by a real one whose local part `provide` gives.

    Tensor objects keep their identity (`torch.utils.swap_tensors`), so the optimizer's groups and state, tied
    parameters and pipeline stages go on referring to the right ones. Views of other tensors become views again. Hooks
    on the tensors themselves (``register_hook``, ``register_post_accumulate_grad_hook``) are lost: add them after.

    Raises:
        EtcError: a tensor is given with another shape or dtype, is referred to by what is not registered, or is still
            on the meta device at the end; the message names it.
    """
    places = places_of(state)
    tensors = {name: placed.tensor for name, placed in places.items()}
    aliases = {name: alias for name, alias in aliases_of(tensors).items() if alias.tensor.device.type == "meta"}
    recurrent = [module for module in state.model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        forget_weights(module)
    for name, alias in aliases.items():
        # A view that autograd knows keeps its owner alive.
        _replace(name, alias.tensor, local_tensor(alias.tensor))
    for name, tensor in tensors.items():
        if tensor.device.type == "meta" and name not in aliases:
            local = provide(places[name], local_tensor(tensor))
            _check_local(name, tensor, local)
            _replace(name, tensor, local.detach())
    for name, alias in aliases.items():
        _replace(name, alias.tensor, view_of_owner(alias, local_tensor(alias.owner)))
    for module in recurrent:
        find_weights(module)
    _refuse_meta(state)


def _check_local(name: str, tensor: torch.Tensor, local: torch.Tensor) -> None:
    expected = local_tensor(tensor)
    if local.shape != expected.shape or local.dtype != expected.dtype or local.device.type == "meta":
        raise EtcError(
            f"{name} was given {local.dtype} {tuple(local.shape)} on {local.device}; "
            f"expected {expected.dtype} {tuple(expected.shape)} on a real device"
        )


def _replace(name: str, tensor: torch.Tensor, local: torch.Tensor) -> None:
    try:
        torch.utils.swap_tensors(tensor, _wrapped(local, tensor))
    except RuntimeError as error:
        raise EtcError(
            f"{name} cannot get its memory, since something else refers to it ({error}); "
            "register views of it as buffers, and take weak references and hooks later"
        ) from error


def _wrapped(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`local` as the kind of tensor that `like` is: parameter or not, DTensor or not."""
    tensor = as_dtensor(local, like) if isinstance(like, DTensor) else local
    if isinstance(like, nn.Parameter):
        if isinstance(like, DTensor) or type(like) is nn.Parameter:
            tensor = nn.Parameter(tensor, requires_grad=like.requires_grad)
        else:
            tensor = make_subclass(type(like), tensor, like.requires_grad)
    for attribute, value in vars(like).items():
        vars(tensor).setdefault(attribute, value)
    return tensor


def _refuse_meta(state: TrainState) -> None:
    left = [name for name, tensor in all_tensors(state).items() if tensor.device.type == "meta"]
    for prefix, module in state.model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                left.append(f"model.{prefix}.{attribute}" if prefix else f"model.{attribute}")
    if left:
        raise EtcError(
            f"{', '.join(left)} would stay on the meta device; "
            "register tensors of a module as parameters or with register_buffer"
        )
