"""Whether this node leaves the job, and until when: what signals, a preemption probe and an administrator have said."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

SAME_WORD_S = 1.0
"""Signals that come this soon after the first repeat it: a scheduler may signal a job step and every process in it, and
who wants a stop presses Ctrl-C again when nothing seems to happen."""


class Word(Enum):
    """What a signal means."""

    LEAVE = auto()
    """Hand over the state, then leave."""
    REPEATED = auto()
    """It was said already."""
    STOP = auto()
    """Stop at once."""


@dataclass(slots=True)
class Leaving:
    """Times are in time.monotonic() seconds. `deadline`: when this node's workers are stopped, whatever they hold;
    `limit_s`: how long that was from when it was set. `signals`: those received, less repetitions. `is_preempted`: the
    probe has said that this node is taken away."""

    signals: list[int] = field(default_factory=list)
    is_preempted: bool = False
    deadline: float = float("inf")
    limit_s: float = float("inf")
    _first_at: float = float("inf")

    def take_signal(self, number: int, now: float) -> Word:
        """A signal to leave has come."""
        if not self.signals:
            self.signals.append(number)
            self._first_at = now
            return Word.LEAVE
        if now - self._first_at < SAME_WORD_S:
            return Word.REPEATED
        self.signals.append(number)
        return Word.STOP

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
