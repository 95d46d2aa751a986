"""The main thread's part in a loss of workers: what becomes of the step, or of the switch, that was under way."""

from __future__ import annotations

import logging
from collections.abc import Callable

from etc_agent.control.causes import kind_of
from etc_agent.control.messages import Agreed
from etc_agent.errors import EtcError
from etc_agent.worker.course import Course
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.loss.frozen import CONSEQUENCES, FrozenWait, StepRetriedError
from etc_agent.worker.loss.latch import Latch, Seen
from etc_agent.worker.loss.step_start import StepStart, reshard_broken_off

_log = logging.getLogger(__name__)


class Survival:
    """`is_recovering`: the next thing to do is to enter the generation that follows the loss."""

    def __init__(
        self, latch: Latch, frozen: FrozenWait, course: Course, live: Callable[[], LiveGeneration | None]
    ) -> None:
        self._latch = latch
        self._live = live
        self._frozen = frozen
        self._course = course
        self._start: StepStart | None = None
        self._is_in_step = False
        self.is_recovering = False

    def begin_step(self, live: LiveGeneration) -> None:
        """Keep what the step finds."""
        if self._start is None or self._start.state is not live.state:
            self._start = StepStart(live.state, live.parallel.device)
        self._start.take()
        self._is_in_step = True

    def has_voted(self) -> None:
        """The vote of the step is over: it is not run again."""
        self._is_in_step = False

    def forget(self) -> None:
        """Drop what was kept of a generation that is no longer in force."""
        self._start = None

    # -- where a loss is met -----------------------------------------------------------------------------------------

    def forgive(self, error: Exception) -> bool:
        """Whether `error`, by which the step has ended, is the consequence of a loss. A step whose vote is not over is
        then as if it had not begun."""
        if self.is_recovering and kind_of(error) in CONSEQUENCES:
            return True  # of a loss about which all have agreed already
        if not self._frozen.is_confirmed(error, self._course.step):
            return False
        self._agree((self._course.step,))
        self._undo_step()
        return True

    def result_after(self, error: RuntimeError) -> bool:
        """The result of the step's vote, which has failed here by `error`, if another worker has seen it.

        Raises:
            StepRetriedError: none has, and the step is as if it had not begun.
            RuntimeError: `error`; no worker was lost.
        """
        step = self._course.step
        if not self._frozen.is_confirmed(error, step):
            raise error
        agreed = self._agree((step, step + 1))
        if agreed.step > step:
            _log.warning("step %d is applied: another worker saw its vote", step)
            self.has_voted()
            return agreed.ok
        self._undo_step()
        raise StepRetriedError from None

    def meet_between_steps(self, error: Exception | None) -> None:
        """Follow the agreement about a loss that is met where no step is under way: by `error`, if any.

        Raises:
            Exception: `error`; no worker was lost.
        """
        if error is not None and not self._frozen.is_confirmed(error, self._course.step):
            raise error
        self._agree((self._course.step,))

    def enters_after(self, error: RuntimeError, completed: int, step: int) -> bool:
        """Whether to enter generation `completed`, whose first step is `step`, after its switch has failed here by
        `error`: any worker has entered it, so this one has completed the migration.

        Raises:
            RuntimeError: `error`; no worker was lost, or it cannot be handled in place.
        """
        seen = self._latch.seen
        if (seen.broken and not seen.completed) or not self._frozen.is_confirmed(error, self._course.step):
            raise error
        agreed = self._agree((self._course.step, step))
        return agreed.generation == completed

    def _agree(self, possible: tuple[int, ...]) -> Agreed:
        """Wait for the agreement, which is about one of the `possible` steps, and open the latch. From now on the main
        thread does nothing but what was agreed, until it has entered the next generation."""
        agreed = self._frozen.agreed()
        if agreed.from_copies:
            self._go_back(agreed.step)
        elif agreed.step not in possible:
            raise EtcError(
                f"the survivors of a loss go on with step {agreed.step}, and this worker can only with step "
                f"{' or '.join(map(str, sorted(set(possible))))}; all workers have to be restarted"
            )
        self._latch.open(agreed, Seen(agreed.generation, agreed.step, agreed.ok))
        self.is_recovering = True
        return agreed

    def _go_back(self, step: int) -> None:
        """Make the state that of `step`, from this worker's own copy: only copies are left of what was lost."""
        live = self._live()
        assert live is not None, "a worker that joins has no copies, and is not asked"
        if live.copier is None:
            raise EtcError(f"this worker makes no copies, and the others go back to those of step {step}")
        reshard_broken_off(live.state.model)
        live.copier.go_back(live.state, step)
        _log.warning("all workers go back from step %d to step %d, from copies in memory", self._course.step, step)
        self._course.step = step
        self._is_in_step = False

    def _undo_step(self) -> None:
        if self._is_in_step:
            assert self._start is not None
            self._start.restore()
            self._is_in_step = False
            _log.warning("step %d is run again", self._course.step)
