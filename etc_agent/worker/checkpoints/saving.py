"""One checkpoint, written on a thread beside training."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from etc_agent.errors import EtcError, one_line
from etc_agent.state.layout import Manifest
from etc_agent.worker.change.exchange import broadcast_json
from etc_agent.worker.checkpoints import folder as folders
from etc_agent.worker.checkpoints.group import Meeting, SavingGroup
from etc_agent.worker.checkpoints.planners import BoxSavePlanner
from etc_agent.worker.checkpoints.snapshot import Snapshot

_log = logging.getLogger(__name__)


class Saving:
    """The checkpoint of `snapshot`, being written. All ranks of a generation make one for the same step.

    `async_save` of torch does not serve here: its thread cannot enter a group that is not training's, and it copies
    what it is given once more.
    """

    def __init__(
        self, folder: Path, keep: int, snapshot: Snapshot, meeting: Meeting, life: str, taken_at: float,
        stopped_s: float,
    ) -> None:
        self.snapshot = snapshot
        self.is_done = False
        self._folder, self._keep, self._meeting, self._life = folder, keep, meeting, life
        self._taken_at, self._stopped_s = taken_at, stopped_s
        self._planner = BoxSavePlanner(snapshot)
        self._group = SavingGroup(meeting, snapshot.step)
        self._is_cut = False
        self._thread = threading.Thread(target=self._run, name="etc-checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def written(self) -> Manifest:
        """The shards that this rank wrote; meaningful once `is_done`."""
        return self._planner.written

    def join(self, timeout_s: float) -> bool:
        """Wait until it is over; returns whether it is."""
        self._thread.join(timeout_s)
        return not self.is_running

    def cut(self) -> None:
        """Abandon it, as far as it waits for other ranks."""
        self._is_cut = True
        self._group.cut()

    def _run(self) -> None:
        try:
            self._group.run(self._write)
            self.is_done = True
        except BaseException as error:  # dcp.CheckpointException is no Exception
            log = _log.warning if self._meeting.rank == 0 else _log.info
            why = "the generation has changed" if self._is_cut else _reason(error)
            log("the checkpoint of step %d was not written, and training goes on: %s", self.snapshot.step, why)

    def _write(self) -> None:
        step, begin = self.snapshot.step, time.monotonic()
        is_first = self._meeting.rank == 0
        path: Path | None = None
        prepared = {"path": "", "error": ""}
        try:
            if is_first:
                path, prepared = self._begin()
            prepared = _from_rank_0(prepared)
            if prepared["error"]:
                raise EtcError(prepared["error"])
            dcp.save({}, storage_writer=dcp.FileSystemWriter(prepared["path"]), planner=self._planner)
            if is_first:
                assert path is not None
                marker = {
                    "time": self._taken_at, "config": self.snapshot.config, "stopped_s": round(self._stopped_s, 6),
                    "written_s": round(time.monotonic() - begin, 6),
                }
                folders.finish(path, step, marker)
                self._prune()
        except BaseException:
            if path is not None:
                folders.discard(path)
            raise

    def _begin(self) -> tuple[Path | None, dict[str, str]]:
        """The folder to write in, if it could be made, and what the other ranks are told."""
        try:
            path = folders.begin(self._folder, self.snapshot.step, self._life)
        except OSError as error:
            return None, {"path": "", "error": f"{self._folder}: {error.strerror or error}"}
        return path, {"path": str(path), "error": ""}

    def _prune(self) -> None:
        try:
            folders.prune(self._folder, self._keep)
        except OSError as error:
            _log.warning("%s: old checkpoints could not be deleted: %s", self._folder, error)


def _from_rank_0(value: dict[str, str]) -> dict[str, str]:
    everyone = dist.group.WORLD
    assert everyone is not None
    return broadcast_json(everyone, 0, value)


def _reason(error: BaseException) -> str:
    """The first rank's own error, where DCP has gathered them."""
    if isinstance(error, dcp.CheckpointException):
        for rank, failure in sorted(error.failures.items()):
            return f"rank {rank}: {one_line(failure[0])}"
    return one_line(error)
