"""One training step, as the script sees it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from etc_agent.errors import EtcError


class Step:
    """One training step: ``with step: ...; step.commit()``. `index` counts from 0 over the whole job."""

    def __init__(self, commit: Callable[[Step, bool], bool], index: int) -> None:
        self._commit = commit
        self.index = index
        self.is_committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and not self.is_committed:
            raise EtcError(f"step {self.index} ended without step.commit(); call it after the backward pass")

    def commit(self, ok: bool = True) -> bool:
        """Vote, and on every rank or on none apply the step: ``optimizer.step()``, ``scheduler.step()``,
        ``zero_grad(set_to_none=True)``. The script calls none of these itself. With a gradient scaler in the state,
        non-finite gradients on any rank count as not `ok`, and the scaler is updated too.

        `ok`: False where this rank's gradients must not be applied (a NaN, say); then no rank applies them, the
        gradients are dropped and training goes on with the next step. Returns whether the step was applied.

        Raises:
            EtcError: this step was committed already.
            RuntimeError: a rank was lost.
        """
        if self.is_committed:
            raise EtcError(f"step {self.index} was committed already; call step.commit() once")
        applied = self._commit(self, ok)
        self.is_committed = True
        return applied
