"""The values that a job starts with: from the script's `init`, or from the modules' own constructors.

`build` runs on the meta device, so whatever a module's ``__init__`` computes (norm weights of 1, a rotary embedding's
frequencies) is lost. Each tensor of the model therefore begins filled with a mark that no computation yields, and a job
in which one still carries it after `init` does not start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from etc_agent.errors import EtcError
from etc_agent.integrations.aliases import local_tensor
from etc_agent.integrations.materialise import materialise
from etc_agent.integrations.optimizer_state import reset_optimizer_state
from etc_agent.integrations.tensors import named_tensors, shard_of
from etc_agent.integrations.train_state import MODULE, TrainState
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Shard
from etc_agent.torch_private.tensors import num_writes

_MARKS: Final = {
    1: (torch.uint8, 0x7F), 2: (torch.int16, 0x7FFD), 4: (torch.int32, 0x7FFD7FFD), 8: (torch.int64, 0x7FFD7FFD7FFD7FFD)
}
"""Bytes per element -> its bits as an integer. As a float each is a NaN that arithmetic passes on but never makes."""

_NUM_ELEMENTS_AT_ONCE: Final = 1 << 24
_NUM_NAMES_SHOWN: Final = 8
WholeModel = Mapping[str, torch.Tensor]
"""``model.<fqn>`` -> the whole plain tensor, under every name that it has."""


def start_values(state: TrainState, device: torch.device, whole: WholeModel | None) -> int:
    """Make the tensors of `state`, which is on the meta device, and give them the values that the job starts with.

    `whole`: the unsharded model as its constructors made it, where `takes_module_values`; else None. Large tensors of
    it may go on living in the state. Returns the step to begin with.

    Raises:
        EtcError: a tensor has no value, since `init` did not write it or the whole model lacks it; or `init` has put a
            tensor of another shape or dtype in one's place. The message names it.
    """

    def provide(shard: Shard, meta: torch.Tensor) -> torch.Tensor:
        if not _is_of_model(shard.tensor.name):
            return torch.zeros_like(meta, device=device)
        if whole is not None:
            return _own_part(whole, shard, meta, device)
        return _marked(meta, device)

    is_meta = {name: tensor.device.type == "meta" for name, tensor in named_tensors(state).items()}
    materialise(state, provide)
    reset_optimizer_state(state)
    before = _written_by_now(state)
    step = _run_init(state)
    _refuse_other_shapes(before, state)
    if whole is None:
        _refuse_unwritten(state, {name: made for name, made in before.items() if is_meta[name]})
    return step


def takes_module_values(state: TrainState) -> bool:
    """Whether the job starts from what the modules' constructors compute."""
    return state.init == MODULE or (isinstance(state.init, tuple) and state.init[0] == MODULE)


def whole_model(state: TrainState) -> WholeModel:
    """The real tensors of an unsharded `state`, by all of their names."""
    model = state.model
    tensors: dict[str, torch.Tensor] = {
        f"model.{name}": local_tensor(param) for name, param in model.named_parameters(remove_duplicate=False)
    }
    buffers = model.named_buffers(remove_duplicate=False)
    return tensors | {f"model.{name}": local_tensor(buffer) for name, buffer in buffers}


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of the model before `init` runs. `version` counts the writes to it so far."""

    shard: Shard
    version: int


def _is_of_model(name: str) -> bool:
    return name.startswith("model.")


def _run_init(state: TrainState) -> int:
    init = state.init[1] if isinstance(state.init, tuple) else state.init
    if init is None or isinstance(init, str):
        return 0
    with torch.no_grad():
        return init(state) or 0


def _own_part(whole: WholeModel, shard: Shard, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    name, shape = shard.tensor.name, shard.tensor.shape
    tensor = whole.get(name)
    if tensor is None:
        raise EtcError(
            f'{name} has no value: with init="module" build() is also called for one rank alone, and the model that it '
            "returned then has no such tensor; give every tensor its name in the unsharded model, or an init function"
        )
    if tuple(tensor.shape) != shape or tensor.dtype != meta.dtype:
        raise EtcError(
            f'{name} is {meta.dtype} {shape} here and {tensor.dtype} {tuple(tensor.shape)} in the model that build() '
            'returns for one rank alone; with init="module" they must agree'
        )
    part = tensor[_slices(shard.box)]
    is_all_of_its_memory = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    if is_all_of_its_memory and part.stride() == meta.stride() and part.device == device:
        return part
    return torch.empty_like(meta, device=device).copy_(part)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))


def _marked(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = torch.empty_like(meta, device=device)
    bits, mark = _bits(tensor)
    bits.fill_(mark)
    return tensor


def _bits(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`tensor` as integers, sharing its memory, and the mark of that width."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind, mark = _MARKS[real.element_size()]
    return real.view(kind), mark


def _written_by_now(state: TrainState) -> dict[str, _Made]:
    return {
        name: _Made(shard_of(name, tensor), num_writes(local_tensor(tensor)))
        for name, tensor in named_tensors(state).items()
        if _is_of_model(name)
    }


def _refuse_other_shapes(before: Mapping[str, _Made], state: TrainState) -> None:
    """What `init` put in the place of a tensor must be of its kind, or no later generation could take its value."""
    for name, tensor in named_tensors(state).items():
        if not _is_of_model(name):
            continue
        now, made = shard_of(name, tensor).tensor, before.get(name)
        if made is None:
            raise EtcError(f"TrainState.init added {name} to the model; make it in build(), for every generation")
        if now != made.shard.tensor:
            raise EtcError(
                f"TrainState.init made {name} {now.dtype} {now.shape}, but build() gives {made.shard.tensor.dtype} "
                f"{made.shard.tensor.shape}; write values into the tensor that build() made"
            )


def _refuse_unwritten(state: TrainState, before: Mapping[str, _Made]) -> None:
    tensors = named_tensors(state)
    unwritten = [name for name, made in before.items() if name in tensors and not _is_written(tensors[name], made)]
    if not unwritten:
        return
    shown = ", ".join(unwritten[:_NUM_NAMES_SHOWN])
    if len(unwritten) > _NUM_NAMES_SHOWN:
        shown += f" and {len(unwritten) - _NUM_NAMES_SHOWN} more"
    have = "has" if len(unwritten) == 1 else "have"
    if state.init is None:
        why, remedy = "TrainState was given no init", "give it an init function that writes every parameter and buffer"
    else:
        why, remedy = "TrainState.init did not write all of it", "write every parameter and buffer there"
    raise EtcError(
        f"{shown} {have} no value at the job's start: {why}, and build() runs on the meta device, where what __init__ "
        f'computes is lost; {remedy}, or give init="module" to start from what the constructors compute, '
        '("module", init) to run init after that'
    )


def _is_written(tensor: torch.Tensor, made: _Made) -> bool:
    """Whether all elements have a value. One byte can hold the mark by right: there a write of any part counts."""
    local = local_tensor(tensor)
    if not local.numel():
        return True
    bits, mark = _bits(local)
    if bits.element_size() == 1:
        return num_writes(local) != made.version or bool((bits != mark).any())
    if not bits.is_contiguous():
        return not bool((bits == mark).any())
    parts = bits.view(-1).split(_NUM_ELEMENTS_AT_ONCE)
    return not any(bool((part == mark).any()) for part in parts)
