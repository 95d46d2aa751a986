"""The values that a job starts with: from the script's `init`, or from the modules' own constructors.

`build` runs on the meta device, so whatever a module's ``__init__`` computes (norm weights of 1, a rotary embedding's
frequencies) is lost. Therefore each tensor of the model is first filled with a mark, a value that no computation
yields, and a job in which a tensor still contains it after `init` does not start.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from etc_agent.errors import EtcError, shortened
from etc_agent.integrations.aliases import local_tensor
from etc_agent.integrations.first_state import OptimizerEntries
from etc_agent.integrations.marks import is_written, marked
from etc_agent.integrations.materialise import materialise
from etc_agent.integrations.optimizer_state import reset_optimizer_state
from etc_agent.integrations.tensors import Placed, own_places, places_of
from etc_agent.integrations.train_state import MODULE, TrainState, init_steps
from etc_agent.state.algebra import missing_box
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Shard
from etc_agent.torch_private.tensors import num_writes

_NUM_NAMES_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class WholeModel:
    """An unsharded model. `tensors`: ``model.<fqn>`` -> the whole plain tensor, under every name that it has. `boxes`:
    name of a logical tensor that lies elsewhere, by the script's layout -> its parts."""

    tensors: Mapping[str, torch.Tensor]
    boxes: Mapping[str, Mapping[Shard, torch.Tensor]]

_LOADED: Final = type(nn.Module().load_state_dict({}))
"""What `load_state_dict` returns, and so an `init` that is a lambda around it."""


def start_values(state: TrainState, device: torch.device, whole: WholeModel | None) -> int:
    """Make the tensors of `state`, which is on the meta device, and give them the values that the job starts with.

    `whole`: the unsharded model as its constructors made it, where `takes_module_values`; else None. Large tensors of
    it may go on living in the state. Returns the step to begin with.

    Raises:
        EtcError: a tensor has no value, since `init` did not write it or the whole model lacks it; or `init` has put a
            tensor of another shape or dtype in one's place. The message names it.
    """

    def provide(placed: Placed, meta: torch.Tensor) -> torch.Tensor:
        if whole is None or not _is_of_model(placed.name):
            return _marked(placed, meta, device)
        if placed.pieces or placed.shard.tensor.name in whole.boxes:
            return _own_pieces(whole, placed, meta, device)
        return _own_part(whole.tensors, placed.shard, meta, device)

    are_meta = {name for name, placed in own_places(state).items() if placed.tensor.device.type == "meta"}
    materialise(state, provide)
    unknown = OptimizerEntries.of(state, reset_optimizer_state(state))
    before = _made(state, are_meta if whole is None else set())
    step = _run_init(state)
    _refuse_other_shapes(before, state)
    _refuse_unwritten(state, before)
    unknown.leave_to_first_step()
    return step


def takes_module_values(state: TrainState) -> bool:
    """Whether the job starts from what the modules' constructors compute."""
    return MODULE in init_steps(state.init)


def whole_model(state: TrainState) -> WholeModel:
    """The real tensors of an unsharded `state`, by all of their names."""
    model = state.model
    tensors: dict[str, torch.Tensor] = {
        f"model.{name}": local_tensor(param) for name, param in model.named_parameters(remove_duplicate=False)
    }
    buffers = model.named_buffers(remove_duplicate=False)
    tensors |= {f"model.{name}": local_tensor(buffer) for name, buffer in buffers}
    boxes: dict[str, dict[Shard, torch.Tensor]] = {}
    for placed in places_of(state).values():
        if placed.pieces and _is_of_model(placed.name):
            tensors.pop(placed.name)
            for shard, view in placed.views(local_tensor(placed.tensor)).items():
                boxes.setdefault(shard.tensor.name, {})[shard] = view
    return WholeModel(tensors, boxes)


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of the model before `init` runs: `num_writes` to it so far, and whether it `is_marked`."""

    logical: frozenset[LogicalTensor]
    num_writes: int
    is_marked: bool


def _is_of_model(name: str) -> bool:
    return name.startswith("model.")


def _run_init(state: TrainState) -> int:
    """The last step that a function has returned."""
    first = 0
    for init in init_steps(state.init):
        if init == MODULE:
            continue
        with torch.no_grad():
            step = init(state)
        if step is None or isinstance(step, _LOADED):
            continue
        if type(step) is not int or step < 0:
            raise EtcError(
                f"TrainState.init returned {shortened(repr(step))}; it must return the step to begin with, 0 or more, "
                "or None for 0"
            )
        first = step
    return first


def _marked(placed: Placed, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory that is marked wherever it holds a box; elsewhere, where no value is expected, it is zero."""
    tensor = marked(meta, device)
    if placed.pieces and sum(shard.box.num_elements for shard in placed.shards) < tensor.numel():
        boxes = placed.views(tensor)
        values = {shard: view.clone() for shard, view in boxes.items()}
        tensor.zero_()
        for shard, view in boxes.items():
            view.copy_(values[shard])
    return tensor


def _own_pieces(whole: WholeModel, placed: Placed, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The local tensor `placed`, box by box."""
    local = torch.zeros_like(meta, device=device)
    for shard, view in placed.views(local).items():
        name = shard.tensor.name
        parts = dict(whole.boxes.get(name, {}))
        if name in whole.tensors:
            given = whole.tensors[name]
            parts[Shard(shard.tensor, Box((0,) * given.dim(), tuple(given.shape)))] = given
        same = {part: given for part, given in parts.items() if part.tensor == shard.tensor}
        if missing_box(shard.box, [part.box for part in same]) is not None:
            raise EtcError(
                f'{name} has no value: with init="module" build() is also called for one rank alone, and what its '
                f"TrainState.layout says of the model there does not cover {shard.box}"
            )
        for part, given in same.items():
            common = part.box.intersect(shard.box)
            if common is not None:
                view[common.within(shard.box)].copy_(given[common.within(part.box)])
    return local


def _own_part(
    whole: Mapping[str, torch.Tensor], shard: Shard, meta: torch.Tensor, device: torch.device
) -> torch.Tensor:
    name, shape = shard.tensor.name, shard.tensor.shape
    tensor = whole.get(name)
    if tensor is not None and tensor.device.type == "meta":
        raise EtcError(
            f'{name} has no value: with init="module" build() is called again, on the real device, and it returned a '
            "tensor on the meta device; make model and optimizer new in every call, and on the default device"
        )
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


def _made(state: TrainState, are_marked: Set[str]) -> dict[str, _Made]:
    return {
        name: _Made(_logical(placed), num_writes(local_tensor(placed.tensor)), name in are_marked)
        for name, placed in own_places(state).items()
        if _is_of_model(name)
    }


def _logical(placed: Placed) -> frozenset[LogicalTensor]:
    return frozenset(shard.tensor for shard in placed.shards)


def _refuse_other_shapes(before: Mapping[str, _Made], state: TrainState) -> None:
    """What `init` put in the place of a tensor must be of its kind, or no later generation could take its value."""
    for name, placed in own_places(state).items():
        if not _is_of_model(name):
            continue
        made = before.get(name)
        if made is None:
            raise EtcError(f"TrainState.init added {name} to the model; make it in build(), for every generation")
        if _logical(placed) != made.logical:
            now, then = next(iter(_logical(placed))), next(iter(made.logical))
            raise EtcError(
                f"TrainState.init made {name} {now.dtype} {now.shape}, but build() gives {then.dtype} "
                f"{then.shape}; write values into the tensor that build() made"
            )


def _refuse_unwritten(state: TrainState, before: Mapping[str, _Made]) -> None:
    unwritten = [
        name
        for name, placed in own_places(state).items()
        if _is_of_model(name)
        and before[name].is_marked
        and not all(
            is_written(view, before[name].num_writes) for view in placed.views(local_tensor(placed.tensor)).values()
        )
    ]
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
