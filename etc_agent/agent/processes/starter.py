"""Starts the worker processes of one node, from a warm spare where there is one."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from etc_agent.agent.interface import gloo_variables
from etc_agent.agent.processes.deaths import DeathWatch
from etc_agent.agent.processes.environment import worker_environment
from etc_agent.agent.processes.logs import NodeLogs
from etc_agent.agent.processes.programs import Program
from etc_agent.agent.processes.spares import Spares, spare_program
from etc_agent.agent.processes.torch_events import TorchEvents
from etc_agent.agent.processes.torch_hook import search_path
from etc_agent.agent.processes.worker_process import WorkerProcess
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.settings import JobSettings
from etc_agent.agent.settings import Spares as Kept
from etc_agent.control.channel import SLOT_VARIABLE, SOCKET_VARIABLE
from etc_agent.control.redundancy import REDUNDANCY_VARIABLE
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import NodeRecord

_LOCAL_RANK = re.compile(r"\$\{?local_rank\b")


class Starter:
    """Starts processes of this job on this node. `control_socket`: where they reach the agent. `program`: what the
    job's workers run."""

    def __init__(
        self,
        settings: JobSettings,
        program: Program,
        record: NodeRecord,
        logs: NodeLogs,
        events: TorchEvents,
        guardian: Guardian,
        deaths: DeathWatch,
        control_socket: str,
    ) -> None:
        self._program = program
        self._settings, self._node, self._logs, self._events = settings, record.name, logs, events
        self._control_socket = control_socket
        chosen = {**gloo_variables(record.address), **settings.env}
        redundancy = {REDUNDANCY_VARIABLE: str(settings.redundancy)}
        self._environment = {**chosen, **search_path({**os.environ, **chosen}), **redundancy}
        self._spare_program = spare_program(settings)
        self.spares = Spares(self._start_spare, guardian, deaths)
        self._reserve = settings.num_slots
        self._has_reserve = settings.spares is Kept.RESERVE and self._are_slots_alike()

    def start(self, index: int, generation: Generation, restart_count: int, *, joining: bool) -> WorkerProcess:
        """Start the worker in slot `index` for `generation`.

        Raises:
            EtcError: its program cannot be started.
        """
        settings, slot = self._settings, Slot(self._node, index)
        environment = worker_environment(
            generation, slot,
            run_id=settings.run_id,
            launch_config=settings.launch_config,
            restart_count=restart_count,
            control_socket=self._control_socket,
            joining=joining,
            extra=self._environment,
        )
        if (spare := self.spares.take(index, environment)) is not None:
            process, folder = spare
            process.begin(index, environment)
            self._logs.adopt(folder, slot, generation)
            return process
        logs = self._logs.of(slot, generation, environment)
        return WorkerProcess.start(self._program, settings.launch_config, index, environment, logs, self._events)

    def keep_spares(self, indices: Collection[int]) -> None:
        """Keep a warm spare in each slot of `indices` and none elsewhere, if this job can have any."""
        are_possible = self._spare_program is not None and self._logs.admit_spares
        self.spares.keep(indices if are_possible else ())

    @property
    def reserve(self) -> frozenset[int]:
        """The index of the reserve for `keep_spares`, where the job file asks for one and there can be one."""
        return frozenset([self._reserve]) if self._has_reserve else frozenset()

    def fill(self, vacant: Iterable[int]) -> None:
        """Workers have died in these slots: the reserve is for the first of them."""
        for index in vacant:
            self.spares.move(self._reserve, index)

    @property
    def warm_slots(self) -> tuple[int, ...]:
        """The slots in which a worker can begin at once."""
        return tuple(sorted(self.spares.warm - {self._reserve}))

    def _are_slots_alike(self) -> bool:
        """Whether a process that is started before its slot is known can work in any."""
        config, words = self._settings.launch_config, map(str, self._settings.args)
        return config.numa_options is None and self._logs.are_alike and not any(map(_LOCAL_RANK.search, words))

    def _start_spare(self, index: int) -> tuple[WorkerProcess, Path | None]:
        assert self._spare_program is not None
        environment = {**self._environment, SOCKET_VARIABLE: self._control_socket, SLOT_VARIABLE: str(index)}
        logs, folder = self._logs.of_spare(Slot(self._node, index))
        process = WorkerProcess.start(
            self._spare_program, self._settings.launch_config, index, environment, logs, self._events
        )
        return process, folder
