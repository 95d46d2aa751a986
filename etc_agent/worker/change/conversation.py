"""A worker's side of the control socket: what the agent asks for, done beside training.

One thread receives. Describing models and preparing generations run on threads of their own, so that a request that
waits for peers never keeps the next one from being heard. The main thread asks two things only: which generation to
vote for, and, once a vote has found every rank armed, the prepared generation itself.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable

import torch

from etc_agent.control.causes import kind_of
from etc_agent.control.channel import Channel, MessageTooLargeError
from etc_agent.control.messages import (
    Armed,
    Committed,
    Describe,
    Described,
    Hello,
    Message,
    Prepare,
    Prepared,
    Refused,
    WhereAreYou,
    Withdrawn,
)
from etc_agent.errors import EtcError, one_line
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.worker.change.prepare import PreparedGeneration, prepare
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.model import Build, describe
from etc_agent.worker.process.position import Whereabouts, dump_stacks
from etc_agent.worker.settings import Settings

_log = logging.getLogger(__name__)

Live = Callable[[], LiveGeneration | None]


class Reconfiguration:
    """Hears the agent out. `generation`: the one that this worker was started for; `live` tells the one in force, None
    before a joiner's first."""

    def __init__(
        self, channel: Channel, slot: int, generation: int, build: Build, settings: Settings, live: Live,
        whereabouts: Whereabouts,
    ) -> None:
        self._channel = channel
        self._hello = Hello(slot, os.getpid(), generation)
        self._is_introduced = False
        self._build = build
        self._settings = settings
        self._live = live
        self._whereabouts = whereabouts
        self._changed = threading.Condition()
        self._wanted = 0
        self._armed = 0
        self._withdrawn: dict[int, str] = {}
        self._is_closed = False
        self._entering = 0
        self._prepared: PreparedGeneration | None = None
        self._describes: queue.SimpleQueue[Describe | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"etc-{name}", daemon=True)
            for name, target in (("control", self._receive), ("describe", self._describe_all))
        ]

    def introduce(self) -> None:
        """Say who this is, once; it comes before anything else."""
        if not self._is_introduced:
            self._is_introduced = True
            self.report(self._hello)

    def start(self) -> None:
        """Introduce this worker, which is ready for changes, and listen from now on."""
        self.introduce()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop listening, and drop what is prepared."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._describes.put(None)
        self._channel.close()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=1.0)
        self._drop()

    def report(self, message: Message) -> None:
        """Send to the agent. A lost agent is no reason to stop: its guardian ends this process if it must."""
        try:
            self._channel.send(message)
        except OSError as error:
            _log.info("the agent does not hear %s: %s", message.type, error)
        except MessageTooLargeError as error:
            _log.error("the agent cannot be told: %s", error)
            if isinstance(message, Described):
                self.report(Described(message.config, None, f"{message.config}: its layout is a {error}"))

    # -- for the main thread ---------------------------------------------------------------------------------------

    def armed(self) -> int:
        """The generation to vote for, or 0 where no new one is armed here."""
        with self._changed:
            return self._armed

    def take(self, generation: int) -> PreparedGeneration:
        """The prepared `generation`, now the caller's: a vote has found every rank armed for it."""
        with self._changed:
            prepared = self._prepared
            assert prepared is not None, "armed, but nothing is prepared"
            assert prepared.generation.id == generation, "armed for another generation than the prepared one"
            self._prepared, self._armed, self._wanted = None, 0, 0
            return prepared

    def drop_withdrawn(self) -> None:
        """Called after a vote that did not switch: drop what was withdrawn since it was armed."""
        with self._changed:
            stale = self._wanted in self._withdrawn
        if stale:
            self._drop()

    def await_armed(self, timeout_s: float) -> PreparedGeneration:
        """Wait until the agent has armed what this joining worker prepared, and take it.

        Raises:
            SystemExit: the generation was withdrawn, or the agent is gone; a joiner has nothing to lose.
            EtcError: neither happened in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._armed or self._withdrawn or self._is_closed, timeout_s):
                raise EtcError(f"joined, but no generation was armed within {timeout_s:g} s")
            if not self._armed:
                raise SystemExit(0)
            # From here on a withdrawal has to end the process: the main thread waits inside the migration's groups.
            self._entering = self._armed
            generation = self._armed
        return self.take(generation)

    def entered(self) -> None:
        """The joiner is in its first generation."""
        with self._changed:
            self._entering = 0

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
            self._is_closed = True
            self._changed.notify_all()

    def _handle(self, message: Message) -> None:
        match message:
            case Describe():
                self._describes.put(message)
            case WhereAreYou():
                dump_stacks()
                self.report(self._whereabouts.position())
            case Prepare():
                self._start_preparing(message)
            case Armed(generation=generation):
                self._arm(generation)
            case Withdrawn(generation=generation, reason=reason):
                self._withdraw(generation, reason)
            case Committed():
                pass
            case _:
                _log.error("the agent sent %s, which is for agents", message.type)

    def _start_preparing(self, message: Prepare) -> None:
        generation = Generation.from_json(message.generation)
        previous = Generation.from_json(message.previous)
        with self._changed:
            self._wanted = generation.id
        self._drop(keep=generation.id)
        threading.Thread(
            target=self._prepare,
            args=(generation, previous, Slot(message.node, self._hello.local_rank)),
            name=f"etc-prepare-{generation.id}",
            daemon=True,
        ).start()

    def _arm(self, generation: int) -> None:
        with self._changed:
            if self._prepared is None or self._prepared.generation.id != generation:
                _log.error("armed for generation %d, which is not prepared here", generation)
                return
            self._armed = generation
            self._changed.notify_all()

    def _withdraw(self, generation: int, reason: str) -> None:
        with self._changed:
            self._withdrawn[generation] = reason
            if self._entering == generation:
                _exit_now()
            # Once armed, a vote in flight may still find every rank armed: the main thread decides after it.
            if self._armed == generation:
                self._armed = 0
                self._changed.notify_all()
                return
            self._changed.notify_all()
        if self._live() is not None:
            self._drop()

    # -- background threads ----------------------------------------------------------------------------------------

    def _describe_all(self) -> None:
        while (request := self._describes.get()) is not None:
            live = self._live()
            try:
                layout = describe(
                    self._build,
                    ParallelConfig.parse(request.config),
                    self._settings.device,
                    live.id if live is not None else 0,
                    self._settings.global_batch,
                )
            except Exception as error:
                self.report(Described(request.config, None, one_line(error), kind_of(error)))
            else:
                self.report(Described(request.config, layout))

    def _prepare(self, generation: Generation, previous: Generation, slot: Slot) -> None:
        if self._settings.device.type == "cuda":
            torch.cuda.set_device(self._settings.device)
        live = self._live()
        try:
            if live is not None and live.id != previous.id:
                raise EtcError(f"asked to leave generation {previous.id}, but this worker is in {live.id}")
            prepared = prepare(generation, previous, slot, self._build, live, self._settings)
        except Exception as error:
            _log.info("generation %d is refused: %s", generation.id, one_line(error), exc_info=True)
            self.report(Refused(generation.id, one_line(error), kind_of(error)))
            return
        with self._changed:
            is_wanted = self._wanted == generation.id and generation.id not in self._withdrawn and not self._is_closed
            if is_wanted:
                self._prepared = prepared
        if is_wanted:
            self.report(Prepared(generation.id, prepared.plan.digest, prepared.phases_ms))
        else:
            prepared.close()

    def _drop(self, keep: int = 0) -> None:
        with self._changed:
            prepared, self._prepared, self._armed = self._prepared, None, 0
            if self._wanted != keep:
                self._wanted = 0
        if prepared is not None:
            prepared.close()


def _exit_now() -> None:
    """End this process from the control thread, its main thread being inside a collective that will not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
