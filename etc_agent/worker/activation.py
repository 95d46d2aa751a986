"""Activation: what the script does with a generation's model once its tensors are real, before the first step: wrap it
in DistributedDataParallel, compile it, set global objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from etc_agent.adapters.accelerate import check_generation, forget_earlier_generation
from etc_agent.errors import EtcError
from etc_agent.integrations.amendments import Built
from etc_agent.integrations.native import TrainState, rng_state, set_rng_state
from etc_agent.torch_private.data_parallel import sync_buffers
from etc_agent.worker.live import LiveGeneration

_MOST_NAMES = 5


def run_activate(live: LiveGeneration) -> None:
    """Call `TrainState.activate` for the generation in force; `live.model` becomes what it returns, or else the model
    that `build` made. Called on the main thread; collective where the script's function is.

    torch's random stream goes on as if nothing had been drawn, so that a change does not show in it.

    Raises:
        EtcError: it has added or replaced parameters or buffers; the message names some.
        Exception: whatever it raises.
    """
    state, device = live.state, live.parallel.device
    if state.activate is None:
        return
    forget_earlier_generation()
    before, stream = _tensors(state), rng_state(device)
    activated = state.activate(state)
    check_generation()
    set_rng_state(device, stream)
    _refuse_other_tensors(before, _tensors(state))
    if activated is not None:
        live.model = activated
    if state.as_built is not None:
        # It runs in every generation, so what it changes is no change by the script.
        state.as_built = replace(state.as_built, numbers=Built.of(state).numbers)


def settle(live: LiveGeneration) -> None:
    """Before the state moves to another generation: where ranks hold different values for a buffer, and one rank's are
    to count, give them to all. Collective over the generation.

    Raises:
        RuntimeError: a worker was lost.
    """
    if isinstance(live.model, nn.Module):
        for module in live.model.modules():
            if isinstance(module, DistributedDataParallel):
                sync_buffers(module)


def _tensors(state: TrainState) -> dict[str, Any]:
    """What has to be the same afterwards: parameters as objects, which the optimizer refers to; buffers by their kind,
    since ``model.to(device)`` makes new ones."""
    params: dict[str, Any] = {
        name: id(param) for name, param in state.model.named_parameters(remove_duplicate=False)
    }
    buffers = state.model.named_buffers(remove_duplicate=False)
    return params | {name: (buffer.shape, buffer.dtype, buffer.device.type) for name, buffer in buffers}


def _refuse_other_tensors(before: dict[str, Any], after: dict[str, Any]) -> None:
    names = list(dict(sorted(before.items() ^ after.items())))
    if names:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        raise EtcError(
            f"TrainState.activate has added, removed or replaced {', '.join(names[:_MOST_NAMES])}{more} of the model; "
            "make, shard and parametrize tensors in build(), and only wrap, compile or hook the model in activate"
        )
