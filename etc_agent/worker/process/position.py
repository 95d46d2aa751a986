"""Where this process's main thread is, for an agent that has seen no step end for too long."""

from __future__ import annotations

import faulthandler
import itertools
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from etc_agent.control.channel import STACKS_SIGNAL
from etc_agent.control.messages import Position

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])
_COLLECTIVES = (
    f"{_TORCH}/distributed/",
    f"{_TORCH}/autograd/graph.py",  # a backward pass: its collectives are started and awaited in C++
    f"{_OURS}/worker/vote.py",
    f"{_OURS}/worker/change/",
    f"{_OURS}/worker/loss/",
    f"{_OURS}/migration/",
)


class Whereabouts:
    """Written by the main thread as it goes from phase to phase, read by the control thread."""

    def __init__(self) -> None:
        self._main = threading.main_thread()
        self._at = (0, 0, "start")

    def enter(self, generation: int, step: int, phase: str) -> None:
        """The main thread is in `phase` of `step` now."""
        self._at = (generation, step, phase)

    def position(self) -> Position:
        """Where it is at this moment. Callable from any thread."""
        generation, step, phase = self._at
        stack = list(_stack(sys._current_frames().get(self._main.ident or 0)))
        called = list(itertools.takewhile(lambda frame: not _is_of_user(frame), stack))
        innermost = stack[len(called)] if len(called) < len(stack) else stack[0] if stack else None
        where = f"{innermost.f_code.co_filename}:{innermost.f_lineno}" if innermost is not None else "unknown"
        is_waiting = any(frame.f_code.co_filename.startswith(_COLLECTIVES) for frame in called)
        return Position(generation, step, phase, is_waiting, where)


def dump_stacks() -> None:
    """Write the stacks of all threads to standard error, if there is one."""
    try:
        faulthandler.dump_traceback(all_threads=True)
    except (ValueError, OSError, RuntimeError, AttributeError):
        pass


def dump_stacks_on_signal() -> None:
    """Have STACKS_SIGNAL write all stacks to standard error, from C: it works while Python code cannot run."""
    try:
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
    except (ValueError, OSError, RuntimeError):  # standard error is closed, or has no descriptor
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


def _stack(frame: FrameType | None) -> list[FrameType]:
    """From the innermost frame out."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_of_user(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((_TORCH, _OURS, "<"))
