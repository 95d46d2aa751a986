"""What the launcher says of this worker in the process's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from etc_agent.control.channel import GENERATION_VARIABLE, JOINING_VARIABLE, SLOT_VARIABLE, SOCKET_VARIABLE
from etc_agent.control.checkpoint_settings import Checkpoint
from etc_agent.control.environment import PARALLEL_VARIABLE
from etc_agent.control.redundancy import REDUNDANCY_VARIABLE, Redundancy
from etc_agent.errors import EtcError
from etc_agent.migration.modes import MODES
from etc_agent.parallel.config import ParallelConfig

VERIFY_VARIABLE = "ETC_VERIFY"
TRACE_VARIABLE = "ETC_TRACE"
MIGRATION_VARIABLE = "ETC_MIGRATION"
BUDGET_VARIABLE = "ETC_MIGRATION_BUDGET_MB"


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """How this worker was started.

    `slot`: the index of its slot, which is its local rank too unless ``--virtual-local-rank`` gives that as 0.
    `socket`: the agent's control socket, or None under plain torchrun, where the size is fixed. `store`: ``host:port``
    of the generation's TCPStore, "" where nothing was said (one process by hand). `dump_dir`: where to write this
    worker's shards around every migration, or None. `trace_dir`: where to write a trace of every switch, or None.
    `migration`, `budget_mb`: what an administrator says of the mode of migrations in place of the script; None and 0
    where nothing is said. `redundancy`, `checkpoint`: as the job file says.
    """

    rank: int
    local_rank: int
    slot: int
    world_size: int
    local_world_size: int
    store: str
    socket: str | None
    generation: int
    node: int
    parallel: ParallelConfig | None
    is_joining: bool
    dump_dir: str | None
    trace_dir: str | None
    migration: str | None
    budget_mb: int
    redundancy: Redundancy
    checkpoint: Checkpoint | None

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """What the environment says.

        Raises:
            EtcError: a variable is not of its form.
        """
        address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
        socket = environ.get(SOCKET_VARIABLE) or None
        migration = environ.get(MIGRATION_VARIABLE) or None
        if migration is not None and migration not in MODES:
            raise EtcError(f"{MIGRATION_VARIABLE}={migration!r} is no mode; set it to one of {', '.join(MODES)}")
        parallel = environ.get(PARALLEL_VARIABLE)
        try:
            config = ParallelConfig.parse(parallel) if parallel else None
        except ValueError as error:
            raise EtcError(f"{PARALLEL_VARIABLE}: {error}") from None
        redundancy = environ.get(REDUNDANCY_VARIABLE)
        try:
            copies = Redundancy.parse(redundancy) if redundancy else Redundancy()
        except ValueError as error:
            raise EtcError(f"{REDUNDANCY_VARIABLE}: {error}") from None
        return cls(
            rank=_integer(environ, "RANK", 0),
            local_rank=_integer(environ, "LOCAL_RANK", 0),
            slot=_integer(environ, SLOT_VARIABLE, _integer(environ, "LOCAL_RANK", 0)),
            world_size=_integer(environ, "WORLD_SIZE", 1),
            local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", 1),
            store=f"{address}:{port}" if address and port else "",
            socket=socket,
            generation=_integer(environ, GENERATION_VARIABLE, 1),
            node=_integer(environ, "GROUP_RANK", 0),
            parallel=config,
            is_joining=environ.get(JOINING_VARIABLE, "") == "1",
            dump_dir=environ.get(VERIFY_VARIABLE) or None,
            trace_dir=environ.get(TRACE_VARIABLE) or None,
            migration=migration,
            budget_mb=_integer(environ, BUDGET_VARIABLE, 0),
            redundancy=copies,
            checkpoint=Checkpoint.read(environ),
        )


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise EtcError(f"{name}={text!r} is not a number; start the script with etc-run or torchrun") from None
