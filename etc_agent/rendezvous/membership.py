"""This node's record under `nodes/`, which exists exactly while its agent lives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from etc_agent.rendezvous.attempts import Attempts
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import (
    AmbiguousError,
    ClientClosedError,
    EtcdError,
    LeaseLostError,
    NameTakenError,
)
from etc_agent.rendezvous.etcd.lease import Lease
from etc_agent.rendezvous.etcd.values import Compare, Get, KeyValue, Put, Value, as_bytes

log = logging.getLogger(__name__)

_RETRY_S = 0.5


class Membership:
    """Registers `key` with `value` under a lease of its own, in the constructor; registers again when etcd has lost the
    lease.

    on_registered(): called, from a background thread, after each later registration under a new lease.
    on_name_taken(): called likewise when, after a lost lease, another instance has the name; there is no further
    attempt.

    Raises:
        NameTakenError: another instance has this name. It may be dead, with a lease that has not expired yet.
        EtcdError: etcd does not answer.
    """

    def __init__(
        self,
        client: EtcdClient,
        key: str,
        value: Value,
        *,
        ttl_s: int = 10,
        on_registered: Callable[[], None] = lambda: None,
        on_name_taken: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self.key = key
        self._value = as_bytes(value)
        self._ttl_s = ttl_s
        self._on_registered, self._on_name_taken = on_registered, on_name_taken
        self.is_name_taken = False
        """Whether, after a lost lease, another instance has the name."""
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._lease = self._register()

    @property
    def lease(self) -> Lease:
        """The present lease; a different one after a loss."""
        return self._lease

    @property
    def is_registered(self) -> bool:
        """Whether the record is certainly in etcd."""
        return self._lease.is_held

    def update(self, value: Value) -> None:
        """Replace the record's value. Without a lease at the moment, the next registration writes it.

        Raises:
            EtcdError: etcd does not answer. The next `update` or registration carries the value.
        """
        with self._lock:
            self._value = as_bytes(value)
            try:
                self._client.put(self.key, self._value, self._lease.id)
            except LeaseLostError:
                log.info("lease %x is gone; %s will be registered again", self._lease.id, self.key)

    def close(self) -> None:
        """Leave: the record is deleted at once. Idempotent."""
        self._closed.set()
        with self._lock:
            lease = self._lease
        lease.close()

    def _register(self) -> Lease:
        lease = Lease(self._client, self._ttl_s, self._handle_lost)
        try:
            self._create(lease)
        except BaseException:
            lease.close()
            raise
        return lease

    def _create(self, lease: Lease) -> None:
        try:
            result = self._client.transact(
                [Compare.absent(self.key)], [Put(self.key, self._value, lease.id)], [Get(self.key)]
            )
            holder = None if result.succeeded else _only(result.reads[0])
        except AmbiguousError:
            # Created only if absent, under this agent's own lease: so repeating it is harmless.
            holder = self._client.get(self.key)
            if holder is None:
                self._create(lease)
                return
        if holder is not None and holder.lease != lease.id:
            raise NameTakenError(
                f"{self.key} is registered by another instance; choose another node name, or wait {self._ttl_s} s "
                "if that one has died"
            )

    def _handle_lost(self) -> None:
        log.warning("etcd has lost the lease of %s; registering again", self.key)
        attempts = Attempts()
        while not self._closed.is_set():
            try:
                with self._lock:
                    self._lease = self._register()
            except NameTakenError as error:
                log.error("%s", error)
                self.is_name_taken = True
                self._on_name_taken()
                return
            except ClientClosedError:
                return
            except EtcdError as error:
                if attempts.failed(time.monotonic(), error):
                    log.warning("%s could not be registered in etcd, which is tried again: %s", self.key, error)
                self._closed.wait(_RETRY_S)
                continue
            if self._closed.is_set():
                self._lease.close()
            else:
                self._on_registered()
            return


def _only(found: tuple[KeyValue, ...]) -> KeyValue | None:
    return found[0] if found else None
