"""TrainState: what a training script hands to the session, once per generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from etc_agent.errors import EtcError, shortened
from etc_agent.integrations.layouts import Layout

MODULE: Final = "module"


class Stateful(Protocol):
    """Anything whose JSON-able state travels with the job, such as a curriculum or a dataset cursor."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Values for a job's start that lie somewhere whole, for `TrainState.init`.

    `source`: a full state dict, or a path (`TrainState.init`).
    `names`: from the model's names to those in the source, where they differ by more than one prefix: a function, which
    returns None for what is not there, or a mapping of those that differ.
    `ignore`: names in the source that are not read, with ``*`` for any part of a name. All others must be used.
    """

    source: Mapping[str, torch.Tensor] | str | Path
    names: Mapping[str, str] | Callable[[str], str | None] | None = None
    ignore: Sequence[str] = ()


@dataclass(slots=True, eq=False)
class TrainState:
    """This rank's part of a training job.

    `model`: its parameters' and buffers' fully qualified names are the names of the *unsharded* model: pipeline stages
    keep the numbers that layers have in the whole. Sharded parameters are DTensors.
    `optimizer`: over the parameters of `model` alone; the session calls its step(). Its groups and state are looked
    at between two steps alone.
    `scheduler`, `scaler`, `extras`: small state that is equal on every rank, carried as JSON. An extra that is not says
    so by an attribute `rule`: ``per_rank`` or ``per_sample`` (docs/worker.md).
    `runtime`: whatever else the script wants to keep for this generation, such as the pipeline schedule. Not carried.
    `init`: how the job gets its values at its start, and again after every restart.

    * A function, called on real tensors: it fills in every parameter and buffer with initial values or a checkpoint's.
      It returns the step that training begins with (None for 0), the same on every rank.
    * ``"module"``: the values that the modules' constructors compute. `build` is called once more, for one rank alone
      and on the real device, with torch's generators started from the session's seed; each rank keeps its part. So the
      job starts with the same values under every config, and each worker needs memory for the whole model once.
    * Whole tensors, of which each rank reads its part: a full state dict, the path of a safetensors file, of a folder
      of such, of a file of `torch.save` or of a torch.distributed.checkpoint; or `Weights` of one of these. Buffers
      that are not persistent get what their constructors compute.
    * A tuple of these, one after the other, such as ``("module", "base.safetensors", function)``: the constructors'
      values first, then those of the file, then the function's. ``"module"`` can only be the first.

    `activate`: called on the main thread whenever a generation comes into force, on real tensors and in its process
    groups, before its first step: it wraps the model in DistributedDataParallel, compiles it, registers hooks, sets
    global objects. What it returns is `session.model`; where it returns None, that is `model`. It adds and replaces no
    parameters or buffers.

    `layout`: for tensors that are cut by hand and are no DTensors: (name, local tensor) -> the `Piece` objects that say
    which boxes of which logical tensors it holds (`cut` and `flat_range` make them), or None for a tensor that every
    rank has whole. The optimizer's state of a parameter is laid out as the parameter.
    `as_built`: what `build` made, before the script changed it (`amendments.Built`); filled in by the
    session. `adapter`: that has built it (`etc_agent.adapters`). `memo`: what was computed of it, such as the boxes
    of its tensors (`tensors.places_of`).

    Raises:
        EtcError: `init` is none of these, or `activate` is not a function.
    """

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: LRScheduler | None = None
    scaler: Any = None
    extras: dict[str, Stateful] = field(default_factory=dict)
    runtime: Any = None
    init: InitStep | tuple[InitStep, ...] | None = None
    activate: Activate | None = None
    layout: Layout | None = None
    as_built: Any = field(default=None, init=False, repr=False)
    adapter: Any = field(default=None, init=False, repr=False)
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.init = _checked(self.init)
        if self.activate is not None and not callable(self.activate):
            raise EtcError(f"TrainState.activate is {self.activate!r}; give a function of the TrainState")


Init = Callable[[TrainState], int | None]
"""(state with real tensors) -> the step to begin with, or None for 0."""

Activate = Callable[[TrainState], Any]
"""(state with real tensors) -> what the script trains with, or None for the model itself."""

InitStep = Init | Weights | Mapping[str, torch.Tensor] | str | Path
"""``"module"``, or where values come from."""


def init_steps(init: Any) -> tuple[Any, ...]:
    """The steps of a `TrainState.init`, in their order."""
    return init if isinstance(init, tuple) else () if init is None else (init,)


def _checked(init: Any) -> Any:
    """`init` with `Weights` for what stands for them.

    Raises:
        EtcError: it is nothing that can be one.
    """
    steps = init_steps(init)
    is_known = init is None or (bool(steps) and MODULE not in steps[1:]) if all(map(_is_known, steps)) else False
    if not is_known:
        raise EtcError(
            f'TrainState.init is {shortened(repr(init))}; give a function of the TrainState, "{MODULE}", a full state '
            f'dict, a path of weights, or a tuple of these, as ("{MODULE}", function)'
        )
    found = tuple(_as_weights(step) for step in steps)
    return found if isinstance(init, tuple) else next(iter(found), None)


def _is_known(step: Any) -> bool:
    return callable(step) or isinstance(step, (str, Path, Mapping, Weights))


def _as_weights(step: Any) -> Any:
    return Weights(step) if isinstance(step, (Path, Mapping)) or (isinstance(step, str) and step != MODULE) else step
