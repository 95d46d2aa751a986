"""One training step, as the script sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from etc_agent.control.causes import kind_of
from etc_agent.errors import EtcError
from etc_agent.worker.loss.frozen import CONSEQUENCES, StepRetriedError


@dataclass(frozen=True, slots=True)
class Deciding:
    """What a session does for its steps.

    `vote`: from this rank's ``ok`` to whether to apply the step, the same on every rank; raises StepRetriedError where
    workers were lost and the step is to be run again. `apply`: applies the step where the vote was ok, on this rank
    alone. `publish`: spreads what was applied, with the other ranks; a loss in it does not undo the step. `forgive`:
    whether an error is the consequence of a loss of workers, so that the step can be run again.
    """

    vote: Callable[[bool], bool]
    apply: Callable[[Step, bool], None]
    publish: Callable[[], None]
    forgive: Callable[[Exception], bool]


class Step(int):
    """One training step: ``with step: ...; step.commit()``. It is its own number, which counts from 0 over the whole
    job and is also called `index`: ``if step % 100 == 0: print(step)``.

    `is_committed`: False after the ``with`` where workers were lost in the step, which is then run again: the next step
    of ``session.steps`` has the same number.
    """

    index: int

    def __new__(cls, deciding: Deciding, index: int) -> Self:
        step = super().__new__(cls, index)
        step.index = index
        return step

    def __init__(self, deciding: Deciding, index: int) -> None:
        self._deciding = deciding
        self._has_voted = False
        self.is_committed = False
        self.is_retried = False
        self.has_ended = False
        self._ended_by: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._ended_by, self.has_ended = error, True
        if self.is_retried and (error is None or isinstance(error, StepRetriedError)):
            return True
        if error is None:
            if not self.is_committed:
                raise EtcError(f"step {self.index} ended without step.commit(); call it after the backward pass")
            return False
        is_torn = self._has_voted and not self.is_committed
        if is_torn or not isinstance(error, Exception) or not self._deciding.forgive(error):
            return False
        self.is_retried = not self.is_committed
        return True

    def advice(self, error: BaseException) -> str:
        """What to do about `error`, which has left the loop over the steps, where an operation with other workers has
        failed outside of the ``with step``; else nothing."""
        if error is self._ended_by or kind_of(error) not in CONSEQUENCES:
            return ""
        return (
            f"an operation with other workers has failed outside of `with step`, near step {self.index}, and ends this "
            "worker; inside of it, or of `with session.guarded()`, the loss of another worker is survived"
        )

    def commit(self, ok: bool = True) -> bool:
        """Vote, and on every rank or on none apply the step: ``optimizer.step()``, ``scheduler.step()``,
        ``zero_grad(set_to_none=True)``. The script calls none of these itself. With a gradient scaler in the state,
        non-finite gradients on any rank count as not `ok`, and the scaler is updated too.

        `ok`: False where this rank's gradients must not be applied (a NaN, say); then no rank applies them, the
        gradients are dropped and training goes on with the next step. Returns whether the step was applied. Where
        workers were lost and the step is to be run again, nothing after it in the ``with`` is run.

        Raises:
            EtcError: this step was committed already.
            RuntimeError: a rank was lost, and the agent has not said so within `loss_timeout_s`.
        """
        if self.is_committed:
            raise EtcError(f"step {self.index} was committed already; call step.commit() once")
        try:
            ok = self._deciding.vote(ok)
        except StepRetriedError:
            self.is_retried = True
            raise
        self._has_voted = True
        self._deciding.apply(self, ok)
        self.is_committed = True
        self._deciding.publish()
        return ok
