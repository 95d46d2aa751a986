"""Warm spares: one process per idle slot of this node that has imported all libraries and waits.

A worker that is to start in such a slot begins in a fraction of the time, when the job grows and when a lost node is
replaced. `etc_agent.worker.process.spare` is the program of these processes.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etc_agent.agent.processes.deaths import DeathWatch
from etc_agent.agent.processes.programs import Script
from etc_agent.agent.processes.worker_process import WorkerProcess
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.settings import JobSettings
from etc_agent.agent.settings import Spares as Kept
from etc_agent.control.channel import Channel
from etc_agent.control.messages import Begin, Hello, Message, Warm

logger = logging.getLogger(__name__)

_RETRY_S = 2.0
_MOST_RETRY_S = 120.0


def spare_program(settings: JobSettings) -> Script | None:
    """The program of a job's warm spares. None where it has none: they are disabled, or the workers run something other
    than a Python script or module."""
    python, args = os.environ.get("PYTHON_EXEC", sys.executable), [str(arg) for arg in settings.args]
    if settings.spares is Kept.COLD or settings.entrypoint != python or args[:1] != ["-u"]:
        return None
    if args[1] != "-m" and (not os.path.isfile(args[1]) or zipfile.is_zipfile(args[1])):
        return None
    return Script(settings.launch_config, python, ("-u", "-m", "etc_agent.worker.process.spare", *args[1:]))


@dataclass(slots=True)
class _Spare:
    process: WorkerProcess
    folder: Path | None
    channel: Channel | None = None
    is_warm: bool = False


@dataclass(slots=True)
class Spares:
    """The warm spares of one node by slot index. The index after the last slot is that of the reserve, which takes the
    slot of any worker that dies.

    `start(index)`: starts a warm spare's process, and returns its log folder too, if any.
    """

    start: Callable[[int], tuple[WorkerProcess, Path | None]]
    guardian: Guardian
    deaths: DeathWatch
    _spares: dict[int, _Spare] = field(default_factory=dict)
    _retry_at: float = 0.0
    _retry_s: float = _RETRY_S

    @property
    def indices(self) -> frozenset[int]:
        """The slots that hold a warm spare."""
        return frozenset(self._spares)

    @property
    def warm(self) -> frozenset[int]:
        """The slots in which a worker can begin at once."""
        return frozenset(index for index, spare in self._spares.items() if spare.is_warm)

    def move(self, index: int, to: int) -> None:
        """The warm spare in slot `index`, if there is a ready one, is for slot `to` from now on, if that has none."""
        if to not in self._spares and index in self.warm:
            self._spares[to] = self._spares.pop(index)

    def keep(self, indices: Collection[int]) -> None:
        """Keep one warm spare in each slot of `indices` and none elsewhere. Call it regularly."""
        for index, spare in list(self._spares.items()):
            if spare.process.poll() is not None:
                self._remove(index)
                self._retry_at, self._retry_s = time.monotonic() + self._retry_s, min(2 * self._retry_s, _MOST_RETRY_S)
                if index in indices:
                    logger.warning("the warm spare in slot %d ended with exit code %s", index, spare.process.exit_code)
            elif index not in indices:
                self._end(index)
        if time.monotonic() < self._retry_at:
            return
        for index in sorted(set(indices) - set(self._spares)):
            with self.guardian.starting():
                process, folder = self.start(index)
                self.guardian.watch_group(process.pid)
            self.deaths.watch(process.pid)
            self._spares[index] = _Spare(process, folder)

    def receive(self, hello: Hello, channel: Channel, message: Message | None) -> None:
        """A warm spare's message. From its Hello on it can be told to begin, and does so once it is warm."""
        for index, spare in self._spares.items():
            if spare.process.pid == hello.pid:
                spare.channel = channel
                if isinstance(message, Warm):
                    spare.is_warm = True
                    logger.debug("the warm spare in slot %d is ready", index)

    def take(self, index: int, environment: Mapping[str, str]) -> tuple[WorkerProcess, Path | None] | None:
        """Turn the warm spare in slot `index` into a worker with `environment`. None where there is none ready."""
        spare = self._spares.get(index)
        if spare is None or spare.channel is None or spare.process.poll() is not None:
            return None
        try:
            spare.channel.send(Begin(dict(environment)))
        except OSError:
            return None
        del self._spares[index]
        self.deaths.forget(spare.process.pid)
        self._retry_s = _RETRY_S
        return spare.process, spare.folder

    def close(self) -> None:
        """Kill all of them at once: they hold no state."""
        for index in list(self._spares):
            self._end(index)

    def _end(self, index: int) -> None:
        process = self._spares[index].process
        process.stop(0.0)
        while process.poll() is None:
            time.sleep(0.005)
        self._remove(index)

    def _remove(self, index: int) -> None:
        spare = self._spares.pop(index)
        self.deaths.forget(spare.process.pid)
        self.guardian.forget_group(spare.process.pid)
        if spare.folder is not None and not any(path.stat().st_size for path in spare.folder.glob("*")):
            shutil.rmtree(spare.folder, ignore_errors=True)
