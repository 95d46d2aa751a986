"""One change of generation as one worker sees it: from the agent's request until the switch, or until it is aborted.

A change owns everything that is made for it: a thread, connections, groups, a world, and the memory of the next
generation. Its thread prepares, and then waits for what happens to the change. Other threads only signal it: `take`
when every rank is armed, `abort` when the agent withdraws the generation. After an abort the change's own thread frees
everything at once; if it is waiting for peers, the change's connections are cut.
"""

from __future__ import annotations

import enum
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

import torch

from etc_agent.adapters.protocol import Adapter
from etc_agent.control.causes import kind_of
from etc_agent.control.messages import Message, Prepared, Refused
from etc_agent.errors import EtcError, one_line
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.worker.change.groups import ChangeConnections
from etc_agent.worker.change.prepare import prepare
from etc_agent.worker.change.prepared import PreparedGeneration
from etc_agent.worker.change.retire import Retirements
from etc_agent.worker.change.state.holdings import Holdings
from etc_agent.worker.change.state.rescued import Rescued
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.redundancy.copy_set import CopySet
from etc_agent.worker.redundancy.rebuild import Survivors, rescue
from etc_agent.worker.settings import Settings

_log = logging.getLogger(__name__)

_STORE_GRACE_S = 1.0
"""Seconds after which the store's connection is cut too. Not at first, because PyTorch then logs a stack trace."""
_CUT_AGAIN_S = 0.1


class AbortedError(EtcError):
    """The agent withdrew the generation while it was being prepared."""


class End(enum.Enum):
    """What happened to a prepared change."""

    TAKEN = enum.auto()
    ABORTED = enum.auto()


@dataclass(frozen=True, slots=True)
class Order:
    """What the agent asks for: a change from `previous` to `generation` by the worker in `slot`. `in_force`: the
    generation that this worker trains in, 0 where it joins."""

    generation: Generation
    previous: Generation
    slot: Slot
    in_force: int


class Change:
    """See the module. `before`: the previous change; this one begins when that one has ended."""

    def __init__(
        self,
        order: Order,
        adapter: Adapter,
        settings: Settings,
        send: Callable[[Message], None],
        retirements: Retirements,
        before: Change | None,
    ) -> None:
        self._order = order
        self._adapter = adapter
        self._settings = settings
        self._send = send
        self._retirements = retirements
        self._before = before
        self._changed = threading.Condition()
        self._end: End | None = None
        self._prepared: PreparedGeneration | None = None
        self._holdings: Future[Holdings] = Future()
        self._copies: CopySet | None = None
        self.connections = ChangeConnections()
        self._thread = threading.Thread(target=self._run, name=f"etc-change-{order.generation.id}", daemon=True)

    @property
    def generation(self) -> Generation:
        return self._order.generation

    def start(self) -> None:
        """Begin to prepare. The agent is sent Prepared or Refused, or nothing if the change is aborted before that."""
        self._thread.start()

    # -- for other threads -----------------------------------------------------------------------------------------

    def at_safe_point(self, live: LiveGeneration) -> None:
        """Called by the main thread between two steps: make the `Holdings` if the preparation still needs them."""
        if not self.wants_holdings:
            return
        try:
            self._copies = live.copier.gone_back_to if live.copier is not None else None
            self._tell(self._holdings.set_result, Holdings.of(live.state))
        except Exception as error:
            # Without its traceback, which would keep the state alive.
            self._tell(self._holdings.set_exception, EtcError(one_line(error)))

    @property
    def wants_holdings(self) -> bool:
        """Whether the preparation needs the `Holdings` and has not got them yet."""
        return bool(self._order.in_force) and not self._holdings.done()

    def is_prepared(self) -> bool:
        with self._changed:
            return self._prepared is not None

    def take(self) -> PreparedGeneration:
        """Hand the prepared generation over to the caller, which owns it from now on."""
        with self._changed:
            assert self._prepared is not None, "armed, but not prepared"
            assert self._end is None, "armed, but given up"
            prepared, self._prepared = self._prepared, None
            self._end = End.TAKEN
            self._changed.notify_all()
            return prepared

    def abort(self) -> None:
        """Abort the change unless it was taken. Returns at once; `join` waits until everything is freed."""
        with self._changed:
            if self._end is not None:
                return
            self._end = End.ABORTED
            is_preparing = self._prepared is None
            self._changed.notify_all()
        self._holdings.cancel()
        if is_preparing and self._thread.is_alive():
            threading.Thread(target=self._free_thread, name=f"etc-abort-{self.generation.id}", daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended and everything that was not taken is freed; returns whether it did in
        time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- for the preparation, on the change's thread ---------------------------------------------------------------

    def check(self) -> None:
        """Raise if the change was aborted.

        Raises:
            AbortedError: it was.
        """
        with self._changed:
            if self._end is End.ABORTED:
                raise AbortedError(f"generation {self.generation.id} was withdrawn")

    def holdings(self) -> Holdings | None:
        """What this worker holds, None where it joins. Waits for the main thread's next safe point.

        Raises:
            EtcError: the state cannot be moved, or no safe point came in time.
        """
        if not self._order.in_force:
            return None
        timeout_s = self._settings.switch_timeout_s
        try:
            return self._holdings.result(timeout_s)
        except CancelledError:
            raise AbortedError(f"generation {self.generation.id} was withdrawn") from None
        except TimeoutError:
            raise EtcError(
                f"no step ended within {timeout_s:g} s (switch_timeout_s), and the state can only be read between two "
                "steps; raise switch_timeout_s, or shorten the pause between steps"
            ) from None

    def rescued(self, survivors: Survivors) -> Rescued:
        """What this worker gives in place of those that were lost, where all have gone back to a copy set. Call it
        after `holdings`. Collective over the survivors.

        Raises:
            RuntimeError: a survivor was lost.
        """
        copies, self._copies = self._copies, None
        return rescue(copies, survivors, self._settings.device)

    def await_memory(self) -> None:
        """Wait until the memory of earlier generations is freed, so that measuring free memory is meaningful."""
        if not self._retirements.wait(self._settings.abort_timeout_s):
            _log.warning("the old generation's memory is not freed yet, so there may be too little for generation %d",
                         self.generation.id)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._settings.device.type == "cuda":
            torch.cuda.set_device(self._settings.device)
        self._await_predecessor()
        self._prepare()
        with self._changed:
            self._changed.wait_for(lambda: self._prepared is None or self._end is not None)
            prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.close()
            del prepared
        self._forget_holdings()
        if self._end is not End.TAKEN:
            # Modules, schedules and tracebacks form reference cycles, and a group keeps its sockets until collected.
            gc.collect()
            self.connections.close()

    def _await_predecessor(self) -> None:
        before, self._before = self._before, None
        if before is not None and not before.join(self._settings.abort_timeout_s):
            _log.error(
                "generation %d was aborted, but is not freed after %g s (abort_timeout_s); build() may still run",
                before.generation.id, self._settings.abort_timeout_s,
            )

    def _prepare(self) -> None:
        generation, order = self.generation.id, self._order
        try:
            if order.in_force not in (0, order.previous.id):
                raise EtcError(f"asked to leave generation {order.previous.id}, but this worker is in {order.in_force}")
            self.check()
            prepared = prepare(self, order.generation, order.previous, order.slot, self._adapter, self._settings)
        except AbortedError:
            _log.info("generation %d was withdrawn while it was prepared", generation)
            return
        except Exception as error:
            # Peers that wait for this worker fail now instead of at their timeout.
            self.connections.hang_up()
            with self._changed:
                is_wanted = self._end is None
            if is_wanted:
                _log.info("generation %d is refused: %s", generation, one_line(error), exc_info=True)
                self._send(Refused(generation, one_line(error), kind_of(error)))
            return
        answer = Prepared(generation, prepared.plan.digest, prepared.phases_ms)
        with self._changed:
            self._prepared = prepared
            is_wanted = self._end is None
        del prepared
        if is_wanted:
            self._send(answer)

    def _free_thread(self) -> None:
        """Cut the connections that the thread may be waiting on, until it has ended."""
        start = time.monotonic()
        while self._thread.is_alive() and time.monotonic() - start < self._settings.abort_timeout_s:
            self.connections.cut()
            if time.monotonic() - start > _STORE_GRACE_S:
                self.connections.store.cut()
            self._thread.join(_CUT_AGAIN_S)

    def _forget_holdings(self) -> None:
        self._copies = None
        self._holdings = Future()
        self._holdings.cancel()

    @staticmethod
    def _tell(put: Callable[[Any], None], value: Any) -> None:
        try:
            put(value)
        except InvalidStateError:
            pass  # aborted meanwhile
