"""Ends this node's workers before other nodes may take over (`etc_agent.reconfig.fencing`).

A thread collects the evidence; the guardian, another process, kills the workers. The agent's loop may be waiting for an
etcd that does not answer, and a stopped agent (SIGSTOP, a frozen machine) can do nothing. So the guardian is told again
and again until when the workers may run, and kills them when that time passes without a new one.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from etc_agent.agent.safety.contact_point import ContactPoint
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.peer_status import Speaker
from etc_agent.agent.safety.reach import Reach
from etc_agent.reconfig.fencing import FOR_EVER, NEVER, Contact, Evidence, Fencing, PeerStatus
from etc_agent.reconfig.known.surroundings import Surroundings
from etc_agent.rendezvous.ports import ANY_PORT, PortRange

_LONGEST_TICK_S = 0.25
_PAUSE_S = 1.0
"""Seconds without a look at the evidence after which this process must have been stopped."""


class Etcd(Protocol):
    """What the fence needs to know of this agent's connection to etcd. Times in time.monotonic() seconds."""

    @property
    def lease_until(self) -> float:
        """Until when this node's lease is certainly held."""

    @property
    def heard_at(self) -> float:
        """When etcd last said anything."""


class Fence:
    """Starts at once. `address`: where other agents reach this one, at one of `ports`."""

    def __init__(
        self, fencing: Fencing, etcd: Etcd, guardian: Guardian, speaker: Speaker, address: str,
        ports: PortRange = ANY_PORT,
    ) -> None:
        self._fencing, self._etcd, self._guardian = fencing, etcd, guardian
        self._around = Surroundings()
        self._contact = Contact()
        self._statuses: dict[str, PeerStatus] = {}
        self._stepped_at = NEVER
        self._step: int | None = None
        self._until = FOR_EVER
        self._looked_at = time.monotonic()
        self._why = ""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._tick_s = min(_LONGEST_TICK_S, fencing.ttl_s / 16)
        self._point = ContactPoint(address, speaker, self._own_status, self._heard, ports)
        self._reach = Reach(
            speaker, self._own_status, self._heard, every_s=fencing.ttl_s / 16, timeout_s=fencing.ttl_s / 8
        )
        self._thread = threading.Thread(target=self._run, name="fence", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port of the contact point."""
        return self._point.port

    @property
    def followed_s(self) -> float:
        """For how long this agent has followed etcd without a break, as its peers are told; 0 while etcd is silent."""
        return self._contact.followed_s(time.monotonic())

    @property
    def alive_at(self) -> dict[str, float]:
        """Node -> when its agent was last asked, or asked us, and said that it has workers."""
        return {node: status.at for node, status in self._statuses.copy().items() if status.has_workers}

    def observe(self, around: Surroundings) -> None:
        """Set what is fenced and which peers to ask. Blocks until the guardian knows until when new workers may run."""
        is_first = around.has_workers and not self._around.has_workers
        self._around = around
        if is_first:
            with self._lock:
                self._look()

    def saw_step(self, step: int) -> None:
        """A worker has completed a step, and runs `step` next. May be called from any thread."""
        self._stepped_at, self._step = time.monotonic(), step

    @property
    def fell(self) -> str:
        """Why the workers had to end, for people; "" where they did not."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._look()
            return self._why

    def lift(self) -> None:
        """The workers have ended; new ones may be started."""
        with self._lock:
            self._why, self._around = "", Surroundings(self._around.others)
            self._allow(FOR_EVER)

    def close(self) -> None:
        """Stop fencing: the workers have ended normally."""
        self._closed.set()
        self._thread.join()
        self._reach.close()
        self._point.close()
        self._allow(FOR_EVER)

    def _own_status(self) -> PeerStatus:
        return PeerStatus(time.monotonic(), self.followed_s, self._around.has_workers, self._step)

    def _heard(self, node: str, status: PeerStatus) -> None:
        """Called from the threads of the contact point and of `Reach`."""
        self._statuses[node] = status

    def _run(self) -> None:
        while not self._closed.wait(self._tick_s):
            with self._lock:
                self._look()

    def _look(self) -> None:
        now, around = time.monotonic(), self._around
        paused_s, self._looked_at = now - self._looked_at, now
        self._contact = self._contact.at(now, self._etcd.heard_at, self._fencing)
        lease_until = self._etcd.lease_until
        is_in_doubt = around.has_workers and self._fencing.is_in_doubt(now, lease_until)
        self._reach.want({**around.gone, **(around.others if is_in_doubt else {})}, around.others)
        if self._why:
            return
        if not around.has_workers:
            self._allow(FOR_EVER)
            return
        evidence = Evidence(
            lease_until, self._etcd.heard_at, frozenset(around.others), around.companions, self._statuses.copy(),
            self._stepped_at,
        )
        until = evidence.workers_until(self._fencing, now)
        if now < min(until, self._until):
            self._allow(until)
        elif paused_s > _PAUSE_S:
            self._fall(f"this agent was stopped for {paused_s:.1f} s, longer than its workers may live without it")
        else:
            self._fall(evidence.why(self._fencing, now))

    def _allow(self, until: float) -> None:
        if until != self._until:
            self._until = until
            self._guardian.allow_until(until)

    def _fall(self, why: str) -> None:
        """Stop the workers. The guardian has already done so if the time it was told last is over."""
        self._why = why
        self._guardian.allow_until(0.0)
