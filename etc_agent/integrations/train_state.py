"""TrainState: what a training script hands to the session, once per generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from etc_agent.errors import EtcError

MODULE: Final = "module"


class Stateful(Protocol):
    """Anything whose JSON-able state travels with the job, such as a curriculum or a dataset cursor."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


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
    * ``("module", function)``: the constructors' values first, then the function, for a checkpoint that has a part.

    `activate`: called on the main thread whenever a generation comes into force, on real tensors and in its process
    groups, before its first step: it wraps the model in DistributedDataParallel, compiles it, registers hooks, sets
    global objects. What it returns is `session.model`; where it returns None, that is `model`. It adds and replaces no
    parameters or buffers.

    `as_built`: what `build` made, before the script changed it (`amendments.Built`); filled in by the session.

    Raises:
        EtcError: `init` is none of these, or `activate` is not a function.
    """

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: LRScheduler | None = None
    scaler: Any = None
    extras: dict[str, Stateful] = field(default_factory=dict)
    runtime: Any = None
    init: Init | Literal["module"] | tuple[Literal["module"], Init] | None = None
    activate: Activate | None = None
    as_built: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.init, tuple):
            is_known = len(self.init) == 2 and self.init[0] == MODULE and callable(self.init[1])
        else:
            is_known = self.init is None or self.init == MODULE or callable(self.init)
        if not is_known:
            raise EtcError(
                f"TrainState.init is {self.init!r}; give a function of the TrainState, "
                f'"{MODULE}", or ("{MODULE}", function)'
            )
        if self.activate is not None and not callable(self.activate):
            raise EtcError(f"TrainState.activate is {self.activate!r}; give a function of the TrainState")


Init = Callable[[TrainState], int | None]
"""(state with real tensors) -> the step to begin with, or None for 0."""

Activate = Callable[[TrainState], Any]
"""(state with real tensors) -> what the script trains with, or None for the model itself."""
