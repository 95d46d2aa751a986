"""The arguments of a session, as one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from etc_agent.control.checkpoint_settings import Checkpoint
from etc_agent.control.redundancy import Redundancy
from etc_agent.worker.data.division import GlobalBatch

Record = Callable[[int, Sequence[int]], None]
"""(step, ids of the samples that this dp rank trained on in it), called once the step is applied."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`timeout_s`: longest wait for peers in the training groups and for the store.
    `switch_timeout_s`: the same in the groups of a change. `abort_timeout_s`: longest wait until an aborted change or
    an old generation is freed. `loss_timeout_s`: longest wait, after an operation with peers has failed, for the agent
    to say that workers were lost. `dump_dir`: where every worker dumps its shards before and after a migration, whose
    boxes are then also hashed on both ends; None for neither. `trace_dir`: where every worker writes a Chrome trace of
    each switch, or None. `migration`: ``auto``, ``keep`` or ``release`` (`etc_agent.migration.modes`). `budget_bytes`:
    most bytes of a worker's state during a migration, 0 for what fits. `redundancy`: of the workers' state.
    `checkpoint`: where and when checkpoints are written, and loaded from when all workers start afresh, if at all."""

    device: torch.device
    global_batch: GlobalBatch
    seed: int
    timeout_s: float
    switch_timeout_s: float
    abort_timeout_s: float
    loss_timeout_s: float
    record: Record | None
    dump_dir: str | None = None
    trace_dir: str | None = None
    migration: str = "auto"
    budget_bytes: int = 0
    redundancy: Redundancy = field(default_factory=Redundancy)
    checkpoint: Checkpoint | None = None
