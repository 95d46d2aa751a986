"""When a checkpoint is written: at the same safe point on every rank, as a vote of all ranks decides.

Each step's vote carries a bid of every rank; its minimum is what is done at the safe point that follows. So no rank
begins a checkpoint for which another is still busy with the one before, and intervals in seconds need no common clock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from enum import IntEnum
from pathlib import Path
from typing import Final, Self

from etc_agent.control.checkpoint_settings import Checkpoint
from etc_agent.worker.checkpoints import folder as folders
from etc_agent.worker.checkpoints.folder import Progress
from etc_agent.worker.checkpoints.group import Meeting
from etc_agent.worker.checkpoints.saving import Saving
from etc_agent.worker.checkpoints.snapshot import Snapshots
from etc_agent.worker.course import Course
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.settings import Settings

_log = logging.getLogger(__name__)

_OTHER_GENERATION_S: Final = 60.0
"""Seconds that a checkpoint may still take when the generation has changed: workers that it needs may be gone."""
_LEAVING_S: Final = 8.0
"""Seconds for which a worker that leaves the job finishes its part: less than its agent waits for it."""
_PROGRESS_S: Final = 0.1


class Bid(IntEnum):
    """What a rank wants, or could do, at the next safe point. The smallest of all ranks' bids counts."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_END = 2


class Saver:
    """Writes a job's checkpoints on this worker. Used from the main thread, but for `end`.

    `timeout_s`: longest wait of a rank for the others, in one checkpoint.
    """

    def __init__(self, settings: Checkpoint, course: Course, timeout_s: float) -> None:
        self._settings, self._course, self._timeout_s = settings, course, timeout_s
        self._folder = Path(settings.folder).absolute()
        self._snapshots = Snapshots()
        self._saving: Saving | None = None
        self._saved_in = 0
        self._deadline = float("inf")
        self._last_step = course.step
        self._last_at = time.monotonic()
        self._agreed, self._agreed_in = Bid.NOTHING, 0
        self._is_ending = self._leaves_it_to_others = False
        self._progress: _ProgressNotes | None = None

    @classmethod
    def of(cls, settings: Settings, course: Course) -> Self | None:
        """None where no checkpoints are written."""
        return None if settings.checkpoint is None else cls(settings.checkpoint, course, settings.timeout_s)

    def begin(self) -> None:
        """Training begins with the present step of the course."""
        self._last_step, self._last_at = self._course.step, time.monotonic()

    def join(self) -> None:
        """This worker joins others that train. It does not know when their last checkpoint was, and leaves it to them
        when the next one is due: otherwise none would be written in a job that others join often enough."""
        self.begin()
        self._leaves_it_to_others = True

    def end(self) -> None:
        """The agent asks for a last checkpoint, after which this worker ends. From any thread."""
        self._is_ending = True

    # -- votes -----------------------------------------------------------------------------------------------------

    def is_due_by_step(self, step: int) -> bool:
        """Whether one is due by the number of steps at the safe point before `step`: equal on every rank."""
        every = self._settings.every_steps
        return bool(every) and step // every > self._last_step // every

    def needs_vote(self, step: int) -> bool:
        """Whether one may be due at the safe point before `step`: equal on every rank, and true at every step where
        the interval is in seconds."""
        return bool(self._settings.interval_s) or self.is_due_by_step(step)

    def bid(self, step: int) -> Bid:
        """This rank's bid for the safe point before `step`."""
        if self._is_ending:
            return Bid.SAVE_AND_END
        interval_s = self._settings.interval_s
        is_late = bool(interval_s) and step > self._last_step and time.monotonic() - self._last_at >= interval_s
        is_due = is_late or self.is_due_by_step(step) or self._leaves_it_to_others
        is_last = step >= self._course.num_steps  # then there is time to wait for the one before
        return Bid.SAVE if is_due and (is_last or not self._is_busy()) else Bid.NOTHING

    def agree(self, bid: Bid, generation: int) -> None:
        """The result of a vote in `generation`: the smallest bid. It holds in that generation only: where a worker is
        lost after a vote, not all of the others need have seen its result."""
        self._agreed, self._agreed_in = bid, generation

    # -- safe points -----------------------------------------------------------------------------------------------

    def at_safe_point(self, live: LiveGeneration) -> None:
        """Between two steps: begin the checkpoint that was agreed on, if any.

        Raises:
            SystemExit: it was the last one, and it is written, or could not be.
        """
        agreed = self._agreed if self._agreed_in == live.id else Bid.NOTHING
        self._agreed = Bid.NOTHING
        self._watch(live.id)
        self._note_progress(live)
        if agreed is Bid.NOTHING:
            return
        self._wait(self._timeout_s)
        self._save(live)
        if agreed is Bid.SAVE_AND_END:
            self._wait(self._timeout_s)
            raise SystemExit(0)

    def close(self, error: BaseException | None) -> None:
        """The session ends, because of `error` if there is one: finish what is being written, or abandon it."""
        if self._progress is not None:
            self._progress.close()
        if error is None:
            self._wait(self._timeout_s)
        elif isinstance(error, SystemExit):
            self._wait(_LEAVING_S)
        if self._is_busy():
            self.abandon()

    def abandon(self) -> None:
        """Do not wait for other ranks any longer: some of them are gone."""
        if self._saving is not None and self._saving.is_running:
            self._saving.cut()

    # -- one checkpoint --------------------------------------------------------------------------------------------

    def _save(self, live: LiveGeneration) -> None:
        begin, step = time.perf_counter(), self._course.step
        taken_at = time.time()
        snapshot = self._snapshots.take(live, step)
        stopped_s = time.perf_counter() - begin
        life = f"gen{live.id}"
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        meeting = Meeting(
            _store_address(live.parallel.config.num_ranks), f"checkpoint/{life}/{restart}/{step}", live.parallel.rank,
            live.parallel.config.num_ranks, self._timeout_s,
        )
        self._saving = Saving(self._folder, self._settings.keep, snapshot, meeting, life, taken_at, stopped_s)
        self._saved_in, self._deadline = live.id, float("inf")
        self._last_step, self._last_at, self._leaves_it_to_others = step, time.monotonic(), False

    def _is_busy(self) -> bool:
        """Whether the last checkpoint is still being written; where it is not, learn from it."""
        saving = self._saving
        if saving is None:
            return False
        if saving.is_running:
            return True
        if saving.is_done:
            self._snapshots.learn(self._saved_in, saving.snapshot.tensors.keys(), saving.written)
        else:
            self._snapshots.forget()
        self._saving = None
        return False

    def _watch(self, generation: int) -> None:
        """See that a checkpoint ends of which some ranks may be gone."""
        if not self._is_busy() or generation == self._saved_in:
            return
        now = time.monotonic()
        self._deadline = min(self._deadline, now + _OTHER_GENERATION_S)
        if now >= self._deadline:
            self.abandon()

    def _wait(self, timeout_s: float) -> None:
        if self._saving is not None:
            self._saving.join(timeout_s)
        self._is_busy()

    def _note_progress(self, live: LiveGeneration) -> None:
        """Rank 0 notes how far training has come, so that a restart can say what was lost."""
        if live.parallel.rank == 0 and self._progress is None:
            self._progress = _ProgressNotes(self._folder, self._course)
        elif live.parallel.rank != 0 and self._progress is not None:
            self._progress.close()
            self._progress = None


class _ProgressNotes:
    """Writes the course's step to the folder, on a thread: a file system that hangs must not stop training."""

    def __init__(self, folder: Path, course: Course) -> None:
        self._folder, self._course = folder, course
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etc-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()

    def _run(self) -> None:
        noted, has_failed = -1, False
        while not self._is_closed.wait(_PROGRESS_S):
            step = self._course.step
            if step == noted:
                continue
            try:
                folders.write_progress(self._folder, Progress(step, time.time()))
                noted = step
            except OSError as error:
                if not has_failed:
                    _log.warning("%s: the progress of training could not be noted: %s", self._folder, error)
                has_failed = True


def _store_address(num_ranks: int) -> str:
    """The store of the generation in force."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{host}:{port}" if num_ranks > 1 or (host and port and "RANK" in os.environ) else ""
