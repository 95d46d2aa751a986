"""The signals that this node's agent takes: those that end or drain its part of the job (torchrun's
``--signals-to-handle``), and those that it hands on to its workers (``--forward-signals``)."""

from __future__ import annotations

import difflib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from etc_agent.errors import EtcError

logger = logging.getLogger(__name__)

_UNSENT = "SIGRTMAX"

Signals = tuple[signal.Signals, ...]


class SignalReceived(Exception):
    """A signal came before the agent's loop was there to take it in turn."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def parse_signals(names: str, source: str = "--signals-to-handle") -> Signals:
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


def heeded(numbers: Signals) -> Signals:
    """Those of `numbers` that this process is to act on.

    Not SIGHUP where it was ignored from the start: ``nohup`` does that, so that the job outlives its terminal, and
    workers inherit it. None in a thread other than the main one, where Python cannot set handlers.
    """
    if numbers and threading.current_thread() is not threading.main_thread():
        logger.warning("this job runs in a thread, so signals do what the program made them do, and drain no node")
        return ()
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in numbers if number is not signal.SIGHUP or not is_ignored)


def keep_handlers() -> None:
    """torchelastic puts handlers of its own in place of ours whenever it starts a worker; let it do so for a signal
    that nobody sends. Workers get the true list in their environment."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _UNSENT


@contextmanager
def interrupting(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Each of the signals raises `SignalReceived` inside; afterwards they do what they did before."""

    def interrupt(number: int, _: object) -> None:
        raise SignalReceived(number)

    with _restored(numbers, interrupt):
        yield


@contextmanager
def dropping(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Inside, each of the signals does nothing, until it is delivered somewhere. Programs that are started do not
    inherit that."""
    with _restored(numbers, lambda *_: None):
        yield


@contextmanager
def _restored(numbers: Iterable[signal.Signals], handler: Callable[[int, object], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def deliver(numbers: Iterable[signal.Signals], to: Callable[[int], None]) -> None:
    """Each of the signals calls `to` with its number, from now on."""
    for number in numbers:
        signal.signal(number, lambda received, _: to(received))


def ignore(numbers: Iterable[signal.Signals]) -> None:
    """While things are taken down in order; what hangs is bounded by timeouts, and the guardian has the last word."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def catches(pid: int, number: int) -> bool:
    """Whether process `pid` has a handler for the signal, or ignores it: else the signal would end it."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return False
    return bool((int(fields["SigCgt"], 16) | int(fields["SigIgn"], 16)) >> (number - 1) & 1)
