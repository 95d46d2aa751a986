"""A sign of life from a script without a session, or from a long pause between two steps of one."""

from __future__ import annotations

import os
import threading
import time

from etc_agent.control.channel import Channel
from etc_agent.control.messages import Heartbeat, Hello, Message, Plain
from etc_agent.worker.process.environment import WorkerEnvironment
from etc_agent.worker.process.position import dump_stacks_on_signal

_INTERVAL_S = 1.0


class _Heart:
    """This process's connection for signs of life, opened by the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._is_dead = False
        self._count = 0
        self._last = float("-inf")

    def beat(self) -> None:
        with self._lock:
            self._count += 1
            if time.monotonic() - self._last < _INTERVAL_S:
                return
            self._last = time.monotonic()
            self._send(Heartbeat(self._count))

    def say_plain(self) -> None:
        with self._lock:
            self._send(Plain())

    def _send(self, message: Message) -> None:
        environment = WorkerEnvironment.read()
        if environment.socket is None or self._is_dead:
            return
        try:
            if self._channel is None:
                self._channel = Channel.connect(environment.socket)
                self._channel.send(Hello(environment.slot, os.getpid(), environment.generation, in_session=False))
                dump_stacks_on_signal()
            self._channel.send(message)
        except OSError:
            self._is_dead = True  # the agent is gone; its guardian sees to this process


_heart = _Heart()


def say_plain() -> None:
    """Tell the agent that this script runs no session, so that a change of size need not wait for one."""
    _heart.say_plain()


def heartbeat() -> None:
    """Tell the agent that this worker is alive. A script that never calls this is never taken for hung; one that has
    begun to must go on, more often than every ``timeouts.hang_s``. In a session steps are signs of life by themselves.
    Cheap: at most one message per second goes out. Does nothing under another launcher.
    """
    _heart.beat()
