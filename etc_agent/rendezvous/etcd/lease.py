"""A lease that renews itself, and knows from the local clock until when it can be relied on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import ClientClosedError, EtcdError, LeaseLostError

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0


class Lease:
    """A lease of `ttl_s` seconds, granted in the constructor and renewed every quarter of that.

    Two things can go wrong. While etcd is unreachable the lease may or may not still exist: `is_held` becomes false
    once ttl_s has passed since the last successful renewal was requested, and true again when etcd is back and still
    knows the lease (after its own restart etcd gives leases their full time again). If etcd says that the lease does
    not exist, it is lost for good: on_lost() is called once, from the lease's thread, and the owner grants another one.

    Raises:
        EtcdError: etcd does not grant it.
    """

    def __init__(self, client: EtcdClient, ttl_s: int, on_lost: Callable[[], None] = lambda: None) -> None:
        if ttl_s < 1:
            raise EtcdError(f"a lease of {ttl_s} s was asked for; it must be at least 1 s")
        self._client = client
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._closed = threading.Event()
        self._is_lost = False
        asked = time.monotonic()
        self.id = client.grant_lease(ttl_s)
        self._deadline = asked + ttl_s
        self._thread = threading.Thread(target=self._keep_alive, name="etcd-lease", daemon=True)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Whether etcd certainly still holds the keys under this lease."""
        return not self._is_lost and not self._closed.is_set() and time.monotonic() < self._deadline

    @property
    def is_lost(self) -> bool:
        """Whether etcd has said that the lease is gone."""
        return self._is_lost

    @property
    def deadline_monotonic(self) -> float:
        """Until when the lease is certainly alive if no further renewal succeeds, in time.monotonic() seconds."""
        return self._deadline

    def close(self) -> None:
        """Stop renewing and revoke the lease, which deletes its keys. If etcd cannot be reached, they expire with the
        lease. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._is_lost:
            return
        try:
            self._client.revoke_lease(self.id, timeout_s=min(_CLOSE_TIMEOUT_S, self._client.timeout_s))
        except EtcdError as error:
            log.warning("lease %x could not be revoked; it expires in at most %d s: %s", self.id, self._ttl_s, error)

    def _keep_alive(self) -> None:
        pause_s, is_renewed = self._ttl_s / 4, True
        while not self._closed.wait(pause_s):
            asked = time.monotonic()
            try:
                granted_s = self._client.keep_lease_alive(self.id, timeout_s=max(1.0, self._ttl_s / 3))
            except LeaseLostError:
                self._is_lost = True
                if not self._closed.is_set():
                    self._on_lost()
                return
            except ClientClosedError:
                return
            except EtcdError as error:
                if self._closed.is_set():
                    return
                if is_renewed:
                    log.warning("this node's lease in etcd could not be renewed, which is tried again: %s", error)
                pause_s, is_renewed = min(0.5, self._ttl_s / 6), False
            else:
                if not is_renewed:
                    log.warning("etcd answers again; this node's lease is renewed")
                is_renewed = True
                self._deadline = asked + granted_s
                pause_s = self._ttl_s / 4
