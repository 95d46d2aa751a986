"""The signals that end or drain this node's part of the job: torchrun's ``--signals-to-handle``."""

from __future__ import annotations

import difflib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from etc_agent.errors import EtcError

_UNSENT = "SIGRTMAX"


class SignalReceived(Exception):
    """A signal came before the agent's loop was there to take it in turn."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def parse_signals(names: str, source: str = "--signals-to-handle") -> tuple[signal.Signals, ...]:
    """``SIGTERM,SIGUSR1`` as signals. `source`: where they were given, for the error.

    Raises:
        EtcError: one is unknown, or cannot be handled by any process.
    """
    found = []
    for name in (part.strip() for part in names.split(",")):
        number = signal.Signals.__members__.get(name)
        if number is None:
            near = difflib.get_close_matches(name.upper(), signal.Signals.__members__, n=1, cutoff=0.4)
            raise EtcError(f"{source}: {name!r} is not a signal" + (f"; did you mean {near[0]}?" if near else ""))
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise EtcError(f"{source}: {name} cannot be handled by any process; leave it out")
        found.append(number)
    return tuple(dict.fromkeys(found))


def keep_handlers() -> None:
    """torchelastic puts handlers of its own in place of ours whenever it starts a worker; let it do so for a signal
    that nobody sends. Workers get the true list in their environment."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _UNSENT


@contextmanager
def interrupting(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Each of the signals raises `SignalReceived` inside; afterwards they do what they did before."""

    def interrupt(number: int, _: object) -> None:
        raise SignalReceived(number)

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def deliver(numbers: Iterable[signal.Signals], to: Callable[[int], None]) -> None:
    """Each of the signals calls `to` with its number, from now on."""
    for number in numbers:
        signal.signal(number, lambda received, _: to(received))


def ignore(numbers: Iterable[signal.Signals]) -> None:
    """While things are taken down in order; what hangs is bounded by timeouts, and the guardian has the last word."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
