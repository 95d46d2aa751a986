"""What a worker runs: a program with arguments, or a function (`processes.functions`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext, start_processes
from torch.distributed.elastic.utils import macros

from etc_agent.agent.processes.numa import bound
from etc_agent.errors import EtcError


class Program(Protocol):
    """What the workers of a job run."""

    def start(self, slot: int, environment: dict[str, str], logs: LogsSpecs) -> PContext:
        """Start one process in slot `slot`. `environment`: added to the agent's own.

        Raises:
            EtcError: there is no such program, or it cannot be bound to CPUs.
        """
        ...


@dataclass(frozen=True, slots=True)
class Script:
    """A program, such as a Python interpreter, and its arguments. `launch_config`: torchrun's LaunchConfig."""

    launch_config: Any
    path: str
    args: tuple[Any, ...]

    def start(self, slot: int, environment: dict[str, str], logs: LogsSpecs) -> PContext:
        config = self.launch_config
        args = tuple(macros.substitute(list(self.args), str(slot)))
        path, args = bound(self.path, args, slot, config.numa_options)
        try:
            return start_processes(
                name=config.role,
                entrypoint=path,
                args={0: args},
                envs={0: environment},
                logs_specs=logs,
            )
        except OSError as error:
            raise EtcError(f"the worker's program cannot be started: {error.filename}: {error.strerror}") from None
