"""What a step finds, kept so that it can be run again after a loss.

Parameters and optimizer state need no copy: nothing writes to them before the vote. Buffers are written in the forward
pass (the statistics of a batch norm), random streams are drawn from, and the script may change its extras and the
optimizer's hyperparameters. What belongs to a step alone (the gradients that a scaler has unscaled, FSDP2's unsharded
parameters, a pipeline's schedule) is built again: the step runs again in the next generation.
"""

from __future__ import annotations

import logging
import pickle
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from etc_agent.adapters.choose import adapter_of
from etc_agent.errors import named
from etc_agent.integrations.aliases import local_tensor
from etc_agent.integrations.host_state import load_extra, rng_state, set_rng_state
from etc_agent.integrations.train_state import TrainState
from etc_agent.torch_private.buffers import buffers_of
from etc_agent.torch_private.tensors import copy_each, num_writes

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer as the last step found it. `local`: this rank's part of it; `copy`: the values of that when it had been
    written to `num_writes` times."""

    tensor: torch.Tensor
    local: torch.Tensor
    copy: torch.Tensor
    num_writes: int

    @property
    def may_be_changed(self) -> bool:
        """Whether it may have been written to since it was copied. Native batch norms write their statistics, vectors
        with one element for each channel, without counting it."""
        return self.local.dim() <= 1 or self.num_writes != num_writes(self.local)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Buffer:
        local = local_tensor(tensor)
        return cls(tensor, local, local.clone(), num_writes(local))


class StepStart:
    """Keeps what each step of one generation finds. `take` before a step costs little: only buffers that were written
    since the last step are copied, and vectors."""

    def __init__(self, state: TrainState, device: torch.device) -> None:
        self.state = state
        self._device = device
        self._modules = [module for module in state.model.modules() if buffers_of(module)]
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        self._streams: tuple[torch.Tensor, Any, Any] | None = None
        self._hyperparameters: list[dict[str, Any]] = []
        self._extras: dict[str, bytes | Exception] = {}

    def take(self) -> None:
        """Called on the main thread just before a step."""
        self._streams = rng_state(self._device), random.getstate(), np.random.get_state()
        self._take_buffers()
        self._hyperparameters = [_hyperparameters(group) for group in self._groups()]
        self._extras = {name: _pickled(extra) for name, extra in self.state.extras.items()}

    def restore(self) -> None:
        """Put back what `take` has found, drop the gradients, and have FSDP2 modules hold their state only."""
        assert self._streams is not None, "a step was begun"
        reshard_broken_off(self.state.model)
        stream, python, numpy = self._streams
        set_rng_state(self._device, stream)
        random.setstate(python)
        np.random.set_state(numpy)
        with torch.no_grad():
            self._restore_buffers()
        for group, found in zip(self._groups(), self._hyperparameters, strict=False):
            group.update(found)
        for name, value in self._extras.items():
            self._restore_extra(name, value)
        adapter_of(self.state).drop_gradients(self.state)

    def _groups(self) -> list[dict[str, Any]]:
        return self.state.optimizer.param_groups if self.state.optimizer is not None else []

    def _take_buffers(self) -> None:
        targets, sources = [], []
        for number, module in enumerate(self._modules):
            for name, tensor in buffers_of(module).items():
                if tensor is None:
                    continue
                kept = self._buffers.get((number, name))
                if kept is None or kept.tensor is not tensor:
                    self._buffers[number, name] = _Buffer.of(tensor)
                elif kept.may_be_changed:
                    targets.append(kept.copy)
                    sources.append(kept.local)
                    kept.num_writes = num_writes(kept.local)
        if targets:
            copy_each(targets, sources)

    def _restore_buffers(self) -> None:
        for (number, name), kept in self._buffers.items():
            buffers_of(self._modules[number])[name] = kept.tensor
            if kept.may_be_changed:
                kept.local.copy_(kept.copy)
                kept.num_writes = num_writes(kept.local)

    def _restore_extra(self, name: str, value: bytes | Exception) -> None:
        if isinstance(value, Exception):
            _log.warning(
                "extras[%r] keeps what the step that is run again has made of it, since it could not be read before: "
                "%s", name, named(value),
            )
        else:
            load_extra(name, self.state.extras[name], pickle.loads(value))


def reshard_broken_off(model: nn.Module) -> None:
    """Have FSDP2's modules hold their sharded parameters, also where a forward pass has broken off in them. After that
    the model is only good to be read."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # `reshard` alone does nothing in a forward pass after which the parameters were to stay unsharded.
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items() if key != "params"
    }


def _pickled(extra: Any) -> bytes | Exception:
    """The state of an extra, apart from its present objects: `state_dict` may return those themselves."""
    try:
        return pickle.dumps(extra.state_dict(), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return error
