"""The signals that this node's agent handles: those that end or drain its part of the job (torchrun's
``--signals-to-handle``), and those that it forwards to its workers (``--forward-signals``)."""

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
    """A signal came before the agent's loop was running and could handle it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def parse_signals(names: str, source: str = "--signals-to-handle") -> Signals:
    """Parse ``SIGTERM,SIGUSR1``. `source`: where they were given, for the error.

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
    """Those of `numbers` that this process should handle.

    Not SIGHUP where it was ignored from the start: ``nohup`` does that so that the job survives its terminal, and
    workers inherit it. None in a thread other than the main one, where Python cannot set handlers.
    """
    if numbers and threading.current_thread() is not threading.main_thread():
        logger.warning("this job runs outside the main thread, so signals keep their handlers and drain no node")
        return ()
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in numbers if number is not signal.SIGHUP or not is_ignored)


def keep_handlers() -> None:
    """Keep torchelastic from replacing our signal handlers whenever it starts a worker: let it set handlers for a
    signal that nobody sends. Workers find the real list in their environment."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _UNSENT


@contextmanager
def interrupting(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Inside the context each of the signals raises `SignalReceived`; afterwards their old handlers are back."""

    def interrupt(number: int, _: object) -> None:
        raise SignalReceived(number)

    with _restored(numbers, interrupt):
        yield


@contextmanager
def dropping(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Inside the context each of the signals is caught and does nothing, until `deliver`. Programs that are started do
    not inherit that."""
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
    """From now on each of the signals calls `to` with its number."""
    for number in numbers:
        signal.signal(number, lambda received, _: to(received))


def ignore(numbers: Iterable[signal.Signals]) -> None:
    """Ignore the signals during shutdown; timeouts limit what hangs, and the guardian ends what is left."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def catches(pid: int, number: int) -> bool:
    """Whether process `pid` handles or ignores the signal; otherwise the signal would end it."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return False
    return bool((int(fields["SigCgt"], 16) | int(fields["SigIgn"], 16)) >> (number - 1) & 1)
