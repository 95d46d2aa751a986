"""A worker's side of the control socket: what the agent asks for, done while the main thread trains.

One thread receives. Describing models and preparing changes run on threads of their own, so that a request which waits
for peers never delays the next message. None of these threads touches the live generation: only the main thread does,
and at safe points it hands them the values that they need.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from etc_agent.adapters.protocol import Adapter
from etc_agent.control.causes import kind_of
from etc_agent.control.channel import Channel, MessageTooLargeError
from etc_agent.control.messages import (
    Agreed,
    Armed,
    Committed,
    Describe,
    Described,
    Finish,
    Freeze,
    Frozen,
    Hello,
    Message,
    Prepare,
    WhereAreYou,
    Withdrawn,
)
from etc_agent.errors import EtcError, one_line
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.worker.change.change import Change, Order
from etc_agent.worker.change.prepared import PreparedGeneration
from etc_agent.worker.change.retire import Retirements
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.loss.latch import Latch
from etc_agent.worker.loss.stuck import Stuck, end_this_worker
from etc_agent.worker.model import describe
from etc_agent.worker.process.position import Whereabouts, dump_stacks
from etc_agent.worker.settings import Settings

_log = logging.getLogger(__name__)

_CUT_AGAIN_S = 0.1
_STUCK_S = 10.0
"""Seconds after which an operation that was cut will not end any more."""
_CLOSE_S = 3.0
"""Seconds to wait, when the session ends, for an aborted change. What is left then ends with the process."""


class Conversation:
    """Receives and answers the agent's messages. `generation`: the one that this worker was started for; `latch`: what
    the main thread has seen of its votes; `cut` cuts the connections of the generation in force. `finish` is called
    when the job stops. `copied` returns the step of the newest complete copy set, -1 for none."""

    def __init__(
        self, channel: Channel, slot: int, generation: int, adapter: Adapter, settings: Settings,
        latch: Latch, cut: Callable[[], None], whereabouts: Whereabouts, retirements: Retirements,
        finish: Callable[[], None] = lambda: None, copied: Callable[[], int] = lambda: -1,
        agent_gone: Callable[[], None] = lambda: None,
    ) -> None:
        self._channel = channel
        self._hello = Hello(slot, os.getpid(), generation)
        self._is_introduced = False
        self._adapter = adapter
        self._settings = settings
        self._latch = latch
        self._cut_in_force = cut
        self._whereabouts = whereabouts
        self._retirements = retirements
        self._finish = finish
        self._copied = copied
        self._agent_gone = agent_gone
        self._changed = latch.changed
        self._change: Change | None = None
        self._taken: Change | None = None
        self._armed = 0
        self._withdrawn = 0
        self._is_closed = False
        self._entering = 0
        self._describes: queue.SimpleQueue[Describe | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"etc-{name}", daemon=True)
            for name, target in (("control", self._receive), ("describe", self._describe_all))
        ]

    def introduce(self, step: int = 0) -> None:
        """Send Hello, once, before anything else. `step`: the first step that this worker runs."""
        if not self._is_introduced:
            self._is_introduced = True
            self.send(replace(self._hello, step=step))

    def start(self, step: int = 0) -> None:
        """Introduce this worker, which is ready for changes and questions, and start to receive."""
        self.introduce(step)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop receiving, and abort the change that is being prepared."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            change = self._change
        self._describes.put(None)
        self._channel.close()
        if change is not None:
            change.abort()
            change.join(min(_CLOSE_S, self._settings.abort_timeout_s))
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=1.0)

    def send(self, message: Message) -> None:
        """Send to the agent. Errors are ignored: if the agent is gone, its guardian ends this process when
        necessary."""
        try:
            self._channel.send(message)
        except OSError as error:
            _log.info("message %s could not be sent to the agent: %s", message.type, error)
        except MessageTooLargeError as error:
            _log.error("a message could not be sent to the agent: %s", error)
            if isinstance(message, Described) and message.layout is not None:
                self.send(Described(message.config, None, f"its layout cannot be sent: {error}"))

    # -- for the main thread ---------------------------------------------------------------------------------------

    def at_safe_point(self, live: LiveGeneration) -> None:
        """Between two steps: if a change is being prepared that needs this worker's `Holdings`, make them now."""
        with self._changed:
            change = self._change
        if change is not None:
            change.at_safe_point(live)

    def armed(self) -> int:
        """The generation to vote for, or 0 where no new one is armed on this worker."""
        with self._changed:
            return self._armed

    def take(self, generation: int) -> PreparedGeneration | None:
        """Hand over the prepared `generation`: a vote has found every rank armed for it. None where workers were lost
        meanwhile. What is handed over is cut if a loss comes before `has_switched`."""
        with self._changed:
            if self._latch.is_closed:
                return None
            change, self._change, self._armed = self._change, None, 0
            assert change is not None, "armed, but nothing is prepared"
            assert change.generation.id == generation, "armed for another generation than the prepared one"
            self._taken = change
            return change.take()

    def has_switched(self) -> None:
        """The switch to what `take` has handed over has ended, in either generation."""
        with self._changed:
            self._taken = None
            self._entering = 0

    def drop_withdrawn(self) -> None:
        """Called after a vote that did not lead to a switch: abort the change if it was withdrawn since it was
        armed."""
        with self._changed:
            change = self._change
            if change is None or change.generation.id != self._withdrawn:
                return
        change.abort()

    def await_armed(self, timeout_s: float) -> PreparedGeneration:
        """On a worker that joins: wait until the agent has armed its prepared generation, and take it.

        Raises:
            SystemExit: the generation was withdrawn, or the agent is gone; a joiner has no state to lose.
            EtcError: neither happened in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._armed or self._withdrawn or self._is_closed, timeout_s):
                raise EtcError(f"joined, but no generation was armed within {timeout_s:g} s")
            prepared = self.take(self._armed) if self._armed else None
            if prepared is None:
                raise SystemExit(0)
            # From here on a withdrawal must end the process: the main thread waits inside the migration's groups.
            self._entering = prepared.generation.id
            return prepared

    def await_recovery(self, live: LiveGeneration) -> PreparedGeneration | None:
        """After a loss: wait until the agent has armed the generation that follows it, and take that. None where more
        workers were lost. How long that may take is for the agents to say.

        Raises:
            EtcError: the agent is gone.
        """
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._armed or self._is_closed or self._latch.is_closed or self._wants_holdings()
                )
                if self._is_closed:
                    raise EtcError("workers were lost, and the agent ended before the job could go on without them")
                if self._armed or self._latch.is_closed:
                    return self.take(self._armed)
            self.at_safe_point(live)

    def _wants_holdings(self) -> bool:
        return self._change is not None and self._change.wants_holdings

    def await_end(self, timeout_s: float) -> None:
        """Answer questions until the agent closes the connection or stops this process."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, timeout_s)

    @property
    def is_over(self) -> bool:
        """Whether the agent has closed the connection."""
        return self._is_closed

    # -- control thread --------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except ValueError as error:
                _log.error("ignored a message of the agent: %s", error)
                continue
            if message is None:
                break
            try:
                self._handle(message)
            except (ValueError, LookupError, TypeError) as error:
                _log.error("the agent's message %s cannot be used: %s", message.type, one_line(error))
        with self._changed:
            is_gone, self._is_closed = not self._is_closed, True
            self._changed.notify_all()
        if is_gone:
            self._agent_gone()

    def _handle(self, message: Message) -> None:
        match message:
            case Describe():
                self._describes.put(message)
            case WhereAreYou():
                dump_stacks()
                self.send(self._whereabouts.position())
            case Prepare():
                self._prepare(message)
            case Armed(generation=generation):
                self._arm(generation)
            case Withdrawn(generation=generation):
                self._withdraw(generation)
            case Committed():
                pass
            case Finish():
                if not self._latch.seen.generation:  # it joins, and has no state to save
                    _exit_now()
                self._finish()
            case Freeze(loss=loss):
                self._freeze(loss)
            case Agreed():
                self._latch.agree(message)
            case _:
                _log.error("ignored message %s of the agent: only workers send it", message.type)

    def _prepare(self, message: Prepare) -> None:
        order = Order(
            Generation.from_json(message.generation), Generation.from_json(message.previous),
            Slot(message.node, self._hello.local_rank), self._latch.generation,
        )
        with self._changed:
            if self._is_closed:
                return
            before, self._armed = self._change, 0
            change = Change(order, self._adapter, self._settings, self.send, self._retirements, before)
            self._change = change
            self._changed.notify_all()
        if before is not None:
            before.abort()
        change.start()

    def _arm(self, generation: int) -> None:
        with self._changed:
            change = self._change
            if change is None or change.generation.id != generation or not change.is_prepared():
                _log.error("armed for generation %d, which is not prepared here", generation)
                return
            self._armed = generation
            self._changed.notify_all()

    def _withdraw(self, generation: int) -> None:
        with self._changed:
            if self._entering == generation:
                _exit_now()
            self._withdrawn = generation
            self._changed.notify_all()
            change, is_armed = self._change, self._armed == generation
            self._armed = 0 if is_armed else self._armed
        # Once armed, a vote under way may still find every rank armed, so the main thread decides after that vote.
        if change is not None and change.generation.id == generation and not is_armed:
            change.abort()

    def _freeze(self, loss: int) -> None:
        """Latch, cut, report: in this order the answer is final."""
        with self._changed:
            seen = self._latch.close(loss)
            change, self._armed = self._change, 0
            self._changed.notify_all()
        self._cut()
        copied = self._copied()
        self.send(Frozen(loss, seen.generation, seen.step, seen.ok, seen.completed, seen.broken, copied))
        if change is not None:
            change.abort()
        if self._latch.is_closed:
            threading.Thread(target=self._cut_on, name=f"etc-cut-{loss}", daemon=True).start()

    def _cut(self) -> None:
        self._cut_in_force()
        with self._changed:
            taken = self._taken
        if taken is not None:
            taken.connections.cut()

    def _cut_on(self) -> None:
        """Cut again what was connected meanwhile, until the main thread has come to wait for the others' agreement."""
        limit_s = min(_STUCK_S, self._settings.abort_timeout_s)
        stuck = Stuck(self._whereabouts.position, limit_s)
        while not self._latch.await_heard(_CUT_AGAIN_S):
            self._cut()
            if stuck.look():
                end_this_worker(self._whereabouts.position(), limit_s)

    # -- describing ------------------------------------------------------------------------------------------------

    def _describe_all(self) -> None:
        while (request := self._describes.get()) is not None:
            self.send(self._described(request.config))

    def _described(self, config: str) -> Described:
        try:
            parsed, settings = ParallelConfig.parse(config), self._settings
            in_force = self._latch.seen.generation
            layout = describe(self._adapter, parsed, settings.device, in_force, settings.global_batch)
        except Exception as error:
            return Described(config, None, one_line(error), kind_of(error))
        return Described(config, layout)


def _exit_now() -> None:
    """End this process from the control thread: the main thread is inside a collective that will not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
