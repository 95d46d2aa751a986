"""Ends this node's workers when the others may be about to go on without it (`etc_agent.reconfig.fencing`).

A thread decides; the guardian, another process, does it. The agent's own loop may be waiting for an etcd that does not
answer, and an agent that is stopped (SIGSTOP, a frozen machine) can decide nothing: so the guardian is told again and
again until when the workers may live, and kills them when that time passes without another word.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.reach import Reach
from etc_agent.reconfig.fencing import Fencing, Isolation
from etc_agent.rendezvous.lease import Lease

_TICK_S = 0.25
_FOR_EVER = float("inf")


class Fence:
    """Starts at once. `lease`: the node's lease of now."""

    def __init__(self, fencing: Fencing, lease: Callable[[], Lease], guardian: Guardian) -> None:
        self._fencing, self._lease, self._guardian = fencing, lease, guardian
        self._reach = Reach(timeout_s=fencing.ttl_s / 8)
        self._others: Sequence[str] = ()
        self._is_shared = False
        self._life_at = float("-inf")
        self._until = _FOR_EVER
        self._why = ""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fence", daemon=True)
        self._thread.start()

    def observe(self, others: Sequence[str], *, is_shared: bool) -> None:
        """What there is to fence. `others`: the stores of the other nodes; none where this node has no workers.
        `is_shared`: the workers' generation has some on other nodes too. When this returns, the guardian knows."""
        is_first = bool(others) and not self._others
        self._others, self._is_shared = others, is_shared
        if is_first:
            with self._lock:
                self._look()

    def saw_life(self) -> None:
        """A worker has ended a step, or sent a heartbeat. Callable from any thread."""
        self._life_at = time.monotonic()

    @property
    def fell(self) -> str:
        """Why the workers had to end, in words; "" where they did not."""
        with self._lock:
            self._check_pause()
            return self._why

    def lift(self) -> None:
        """The workers are known to have ended; new ones may come."""
        with self._lock:
            self._why, self._others = "", ()
            self._allow(_FOR_EVER)

    def close(self) -> None:
        """The workers have ended in order."""
        self._closed.set()
        self._thread.join()
        self._reach.close()
        self._allow(_FOR_EVER)

    def _run(self) -> None:
        while not self._closed.wait(_TICK_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        self._check_pause()
        if self._why:
            return
        now, deadline, others = time.monotonic(), self._lease().deadline_monotonic, self._others
        self._reach.want(others, now=self._fencing.is_in_doubt(deadline - now))
        heard_at = max(deadline - self._fencing.ttl_s, self._reach.answered_at)
        isolation = Isolation(bool(others), self._is_shared, deadline - now, now - heard_at, now - self._life_at)
        if isolation.must_stop(self._fencing):
            silent_s = now - deadline + self._fencing.ttl_s
            self._fall(f"etcd has not answered for {silent_s:.0f} s, nor have most of the other nodes")
        else:
            self._allow(max(deadline, now + self._fencing.quiet_s) if others else _FOR_EVER)

    def _allow(self, until: float) -> None:
        if until != self._until:
            self._until = until
            self._guardian.allow_until(until)

    def _check_pause(self) -> None:
        late_s = time.monotonic() - self._until
        if late_s > 0 and not self._why:
            self._fall(f"this agent was stopped until {late_s:.1f} s after its lease")

    def _fall(self, why: str) -> None:
        self._why = why
        self._guardian.allow_until(0.0)
