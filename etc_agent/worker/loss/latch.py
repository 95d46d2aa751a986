"""The latch between the main thread and the control thread: once a loss has closed it, no vote's result is acted on.

The main thread passes every result of a vote through the latch before it acts on it; the control thread closes it and
answers in the same moment what has passed. So the answer is final, although the main thread may still be computing, or
blocked in a collective, and hears of the loss only later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from etc_agent.control.messages import Agreed
from etc_agent.errors import PeerLostError


class LatchClosedError(PeerLostError):
    """Workers were lost: the result of this vote must not be acted on here."""


@dataclass(frozen=True, slots=True)
class Seen:
    """How far this worker has come, by the votes whose result it has seen (`control.messages.Frozen`)."""

    generation: int = 0
    step: int = 0
    ok: bool = True
    completed: int = 0
    broken: str = ""


class Latch:
    """See the module. `changed`: notified whenever the latch, or what its owner guards with it, changes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._seen = Seen()
        self._loss = 0
        self._last_loss = 0
        self._agreed: Agreed | None = None
        self._is_heard = False

    @property
    def seen(self) -> Seen:
        with self.changed:
            return self._seen

    @property
    def is_closed(self) -> bool:
        with self.changed:
            return self._loss > 0

    @property
    def generation(self) -> int:
        """The generation in force, or the one that will be, as soon as the main thread follows an agreement."""
        with self.changed:
            return self._agreed.generation if self._agreed is not None else self._seen.generation

    # -- for the main thread ---------------------------------------------------------------------------------------

    def record(self, seen: Seen) -> None:
        """What the next answer will say.

        Raises:
            LatchClosedError: the answer was given already, so the caller must not act on what it has seen.
        """
        with self.changed:
            if self._loss:
                raise LatchClosedError("workers were lost, and this worker is frozen")
            self._seen = seen

    def await_closed(self, timeout_s: float, is_over: Callable[[], bool]) -> bool:
        """Wait until a loss closes the latch; returns whether one did. `is_over` ends the wait."""
        with self.changed:
            self.changed.wait_for(lambda: self._loss or is_over(), timeout_s)
            return self._loss > 0

    def await_agreed(self, is_over: Callable[[], bool]) -> Agreed | None:
        """Wait until the survivors have agreed about the loss that has closed the latch. None once `is_over`."""
        with self.changed:
            self._is_heard = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._agreed is not None or is_over())
            return self._agreed

    def open(self, agreed: Agreed, seen: Seen) -> bool:
        """Open again: the main thread has done what was agreed, and `seen` is what it has come to by that. Returns
        False where another loss has closed the latch meanwhile; then it answers that with `seen`."""
        with self.changed:
            self._seen = seen
            if agreed is not self._agreed:
                return False
            self._loss, self._agreed = 0, None
            return True

    # -- for the control thread ------------------------------------------------------------------------------------

    def close(self, loss: int) -> Seen:
        """Close the latch for the loss of that number; returns what is to be answered."""
        with self.changed:
            if loss > self._last_loss:
                self._loss = self._last_loss = loss
                self._agreed, self._is_heard = None, False
                self.changed.notify_all()
            return self._seen

    def await_heard(self, timeout_s: float) -> bool:
        """Wait until the main thread waits for an agreement about the loss, or is done with it; whether it does."""
        with self.changed:
            return self.changed.wait_for(lambda: self._is_heard or not self._loss, timeout_s)

    def agree(self, agreed: Agreed) -> None:
        """Hand an agreement to the main thread. One about an earlier loss is out of date."""
        with self.changed:
            if self._loss and agreed.loss == self._loss:
                self._agreed = agreed
                self.changed.notify_all()
