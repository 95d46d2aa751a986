"""Signals that tell a whole node to leave, in the processes of one worker.

A scheduler that takes a node away signals the agent and everything below it at once. The agent then hands the node's
state over, for which it needs its workers; so while a session is open, such a signal is left to the agent. The agent
answers by the leave itself. Where it has to end this worker it kills it, and where nobody else was signalled it sends
the signal again: a second one, more than a second after the first, does what it would have done without a session.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

from etc_agent.control.messages import Message, Signalled
from etc_agent.torch_private.loader_workers import after_signal_handlers

_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_USUAL = "SIGTERM,SIGHUP,SIGQUIT"
_REPEAT_S = 1.0
"""Signals that come this soon after the first repeat it."""
_LATE = 0x80
"""Marks a signal's number where the main thread's handler has run: long after the signal, maybe, and known by then."""
_FOR_PARENT_S = 0.5
"""A child's signal was for all if its parent gets one within this time; else it was `Process.terminate`, say."""


class LeftToAgent:
    """From now on, signals that tell a node to leave are sent to the agent, once, and do nothing else. Those are left
    alone for which the script has a handler of its own, and SIGINT, which is an exception in Python.

    Children of this process that are forked, and the workers of its DataLoaders however they are started, go on too
    when this process has got such a signal. Programs that it runs do what they do by themselves.

    `send`: sends a message to the agent. Only in the main thread can handlers be set; elsewhere nothing changes.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._pid = send, os.getpid()
        self._first_at = float("inf")
        is_possible = threading.current_thread() is threading.main_thread()
        self._numbers = frozenset(filter(_has_no_handler, _named())) if is_possible else frozenset()
        if not self._numbers:
            return
        self._notice = _Notice.create()
        self._in_child = _ChildHandler(self._notice)
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # The main thread may wait inside a collective and run no Python; this wakes a thread of ours all the same.
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._is_woken = before == -1
        if not self._is_woken:  # it is in use, by asyncio, say; then a main thread that waits hears of it later
            signal.set_wakeup_fd(before)
        for number in self._numbers:
            signal.signal(number, self._handle)
        self._undo = after_signal_handlers(partial(_go_on_with_parent, self._notice.path))
        _watch_forks()
        self._thread = threading.Thread(target=self._listen, name="etc-signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Signals do again what they did. Idempotent."""
        if not self._numbers:
            return
        for number in self._numbers:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)
        self._numbers = frozenset()
        if self._is_woken:
            signal.set_wakeup_fd(-1)
        self._undo()
        self._writer.close()
        self._thread.join()
        self._reader.close()
        self._notice.close()

    def _handle(self, number: int, _: FrameType | None) -> None:
        """In the main thread, when it runs Python next: of this process, or of one that was forked from it."""
        if os.getpid() != self._pid:
            self._in_child(number, None)
        else:
            with contextlib.suppress(OSError):
                self._writer.send(bytes([number | _LATE]))

    def _listen(self) -> None:
        while received := self._reader.recv(64):
            for byte in received:
                number, is_late = byte & ~_LATE, bool(byte & _LATE)
                # A handler that the script has set since then has its own idea of the signal.
                if number in self._numbers and signal.getsignal(number) == self._handle:
                    self._hear(number, is_late=is_late)

    def _hear(self, number: int, *, is_late: bool) -> None:
        now = time.monotonic()
        if self._first_at == float("inf"):
            self._first_at = now
            self._notice.give()
            self._send(Signalled(number))
        elif now - self._first_at >= _REPEAT_S and not is_late:
            _die_of(number)


class _Notice:
    """Whether a worker has got a signal to leave, for its children: one byte of shared memory."""

    def __init__(self, file: int, path: str) -> None:
        self.path, self._file = path, file
        self._byte = mmap.mmap(file, 1)

    @classmethod
    def create(cls) -> _Notice:
        file = os.memfd_create("etc-run-signals")
        os.ftruncate(file, 1)
        return cls(file, f"/proc/{os.getpid()}/fd/{file}")

    @classmethod
    def of_parent(cls, path: str) -> _Notice:
        """The one that another process has created at `path`."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)

    def give(self) -> None:
        self._byte[0] = 1

    @property
    def is_given(self) -> bool:
        return self._byte[0] == 1

    def close(self) -> None:
        self._byte.close()
        os.close(self._file)


class _ChildHandler:
    """Of a child of a worker, for its main thread: a signal that the worker has got too does nothing, once."""

    def __init__(self, notice: _Notice) -> None:
        self._notice = notice
        self._first_at = float("inf")

    def __call__(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_at == float("inf") and self._was_for_all(now + _FOR_PARENT_S):
            self._first_at = now
        elif now - self._first_at >= _REPEAT_S or self._first_at == float("inf"):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _was_for_all(self, deadline: float) -> bool:
        while not self._notice.is_given:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True


def _go_on_with_parent(path: str) -> None:
    """In a DataLoader's worker process; `path`: of the notice of the process that started it."""
    try:
        handler = _ChildHandler(_Notice.of_parent(path))
    except OSError:  # the parent has closed its session meanwhile
        return
    for number in _named():
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, handler)


def _named() -> frozenset[int]:
    names = os.environ.get(_VARIABLE) or _USUAL
    found = {signal.Signals.__members__.get(name.strip()) for name in names.split(",")}
    return frozenset(number for number in found if number not in (None, signal.SIGINT))


def _has_no_handler(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL


def _die_of(number: int) -> None:
    """Have `number` do what it does by default, from any thread: Python sets handlers in the main one alone, which may
    not come to run Python any more."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(number, None)
    os.kill(os.getpid(), number)


_are_forks_watched = False


def _watch_forks() -> None:
    """Children that are forked must not wake the thread of their parent."""
    global _are_forks_watched
    if not _are_forks_watched:
        _are_forks_watched = True
        os.register_at_fork(after_in_child=_stop_waking_parent)


def _stop_waking_parent() -> None:
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
