"""Collectives of the script between two steps, such as an evaluation, that survive the loss of other workers."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self


class Guarded:
    """``with session.guarded() as guarded: evaluate()``.

    `is_complete`: after the ``with``, False where workers were lost in it: it was broken off, and the next step runs
    without them. It may differ between ranks: one that has nothing left to do there does not notice the loss.
    """

    def __init__(self, forgive: Callable[[Exception], bool]) -> None:
        self._forgive = forgive
        self.is_complete = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            self.is_complete = True
            return False
        return isinstance(error, Exception) and self._forgive(error)
