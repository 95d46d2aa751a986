"""One queue for everything that wakes the agent."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from etc_agent.control.channel import Channel
from etc_agent.control.messages import Hello, Message


@dataclass(frozen=True, slots=True)
class Preempted:
    """This node is about to be taken away (preemption)."""


@dataclass(frozen=True, slots=True)
class Signal:
    """This node is told to leave, by the signal `number`."""

    number: int


@dataclass(frozen=True, slots=True)
class ForWorkers:
    """The signal `number` is to be forwarded to the workers."""

    number: int


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a worker; None: the worker has closed the connection."""

    hello: Hello
    channel: Channel
    message: Message | None


Item = Said | Preempted | Signal | ForWorkers | None
"""None: something has changed in etcd."""


class Inbox:
    """The queue: changes in etcd, messages of workers, signals."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def changed(self) -> None:
        self._queue.put(None)

    def said(self, hello: Hello, channel: Channel, message: Message | None) -> None:
        self._queue.put(Said(hello, channel, message))

    def signalled(self, number: int) -> None:
        self._queue.put(Signal(number))

    def signalled_for_workers(self, number: int) -> None:
        self._queue.put(ForWorkers(number))

    def preempted(self) -> None:
        """Put: this node is about to be taken away."""
        self._queue.put(Preempted())

    def take(self, timeout_s: float) -> list[Item]:
        """Everything in the queue, after waiting up to `timeout_s` for the first item."""
        items: list[Item] = []
        try:
            items.append(self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait())
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            return items
