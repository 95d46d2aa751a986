"""Whether this node leaves the job, and until when: what signals, a preemption probe and an administrator have said."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

REPEAT_S = 1.0
"""Seconds after the first signal in which further ones count as repetitions: a scheduler may signal a job step and each
of its processes. A user who wants to stop at once presses Ctrl-C again later, when nothing seems to happen."""


class SignalMeaning(Enum):
    """What a signal means."""

    LEAVE = auto()
    """Hand over the state, then leave."""
    REPEATED = auto()
    """A repetition of the first signal."""
    STOP = auto()
    """Stop at once."""


@dataclass(slots=True)
class Leaving:
    """Times are in time.monotonic() seconds. `deadline`: when this node's workers are stopped, even if their state was
    not handed over; `limit_s`: its distance from when it was set. `signals`: those received, without repetitions.
    `is_preempted`: the probe has said that this node is about to be taken away."""

    signals: list[int] = field(default_factory=list)
    is_preempted: bool = False
    deadline: float = float("inf")
    limit_s: float = float("inf")
    _first_at: float = float("inf")

    def take_signal(self, number: int, now: float) -> SignalMeaning:
        """A signal to leave has come."""
        if not self.signals:
            self.signals.append(number)
            self._first_at = now
            return SignalMeaning.LEAVE
        if now - self._first_at < REPEAT_S:
            return SignalMeaning.REPEATED
        self.signals.append(number)
        return SignalMeaning.STOP

    def be_gone_by(self, now: float, limit_s: float) -> None:
        """The state is to be handed over in `limit_s`, or sooner where that was said before."""
        self.limit_s = limit_s
        self.deadline = min(self.deadline, now + limit_s)

    @property
    def has_deadline(self) -> bool:
        return self.deadline != float("inf")

    @property
    def is_told(self) -> bool:
        """Whether a signal or the probe has told this node to leave."""
        return bool(self.signals) or self.is_preempted
