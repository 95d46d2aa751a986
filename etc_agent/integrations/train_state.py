"""TrainState: what a training script hands to the session, once per generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Stateful(Protocol):
    """Anything whose JSON-able state travels with the job, such as a curriculum or a dataset cursor."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(slots=True, eq=False)
class TrainState:
    """This rank's part of a training job.

    `model`: its parameters' and buffers' fully qualified names are the names of the *unsharded* model: pipeline stages
    keep the numbers that layers have in the whole. Sharded parameters are DTensors.
    `optimizer`: over the parameters of `model` alone; the session calls its step(). Its groups and state are read from
    another thread beside training, so a step() must not replace them, not even for its own duration.
    `scheduler`, `scaler`, `extras`: small state that is equal on every rank, carried as JSON. An extra that is not says
    so by an attribute `rule`: ``per_rank`` or ``per_sample`` (docs/worker.md).
    `runtime`: whatever else the script wants to keep for this generation, such as the pipeline schedule. Not carried.
    `init`: called at the job's start, and after every restart, on the materialised state, to fill in initial weights
    or a checkpoint's. It returns the step that training begins with, None for 0, the same on every rank.
    """

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: LRScheduler | None = None
    scaler: Any = None
    extras: dict[str, Stateful] = field(default_factory=dict)
    runtime: Any = None
    init: Callable[[TrainState], int | None] | None = None
