"""The leader election: the leader is the agent whose lease holds the `leader` key, whose create_revision fences
writes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from etc_agent.rendezvous.attempts import Attempts
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import AmbiguousError, ClientClosedError, EtcdError, LeaseLostError
from etc_agent.rendezvous.etcd.lease import Lease
from etc_agent.rendezvous.etcd.values import Compare, Delete, Get, KeyValue, Put, Value, as_bytes
from etc_agent.rendezvous.mirror import Mirror, Snapshot

log = logging.getLogger(__name__)

_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Mandate:
    """One term as the leader: `key` was created at this revision, under this lease."""

    key: str
    create_revision: int
    lease: int


class Election:
    """Campaigns for `key` with `value` in a thread of its own until `resign` or `close`.

    mirror: must cover `key`. lease: returns the lease to lead under (Membership.lease, so that a node which has lost
    its record has also lost the lead).
    on_change(is_leader): called from the election's thread when etcd has made this agent the leader, or shows that it
    is no longer the leader. Unlike is_leader it does not depend on the local clock, and it is not called for resigning.
    """

    def __init__(
        self,
        client: EtcdClient,
        mirror: Mirror,
        key: str,
        value: Value,
        lease: Callable[[], Lease],
        on_change: Callable[[bool], None] = lambda is_leader: None,
    ) -> None:
        self._client, self._mirror = client, mirror
        self._key, self._value = key, as_bytes(value)
        self._lease = lease
        self._on_change = on_change
        self._mandate: Mandate | None = None
        self._attempts = Attempts()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="etcd-election", daemon=True)
        self._thread.start()

    @property
    def is_leader(self) -> bool:
        """Whether this agent leads now, as far as etcd's last answer and the local clock show. Writes still go through
        FencedWriter, since only etcd knows for certain."""
        mandate, lease = self._mandate, self._lease()
        return mandate is not None and lease.id == mandate.lease and lease.is_held

    @property
    def mandate(self) -> Mandate | None:
        """The term to write under, or None while this agent is not the leader."""
        return self._mandate if self.is_leader else None

    @property
    def create_revision(self) -> int | None:
        """The fencing token of this term, or None while this agent is not the leader."""
        mandate = self.mandate
        return mandate.create_revision if mandate else None

    def resign(self) -> None:
        """Stop campaigning and give the lead back, so that another agent takes over at once. Idempotent."""
        with self._lock:
            self._stopped.set()
            mandate, self._mandate = self._mandate, None
        self._mirror.poke()
        if mandate is not None:
            self._give_lead_back(mandate)

    close = resign

    def _run(self) -> None:
        while not self._stopped.is_set():
            lease_id = self._lease().id
            holder = self._campaign(lease_id)
            if holder is None:
                self._stopped.wait(_RETRY_S)
            elif holder.lease != lease_id:
                self._wait_for_end_of(holder)
            else:
                self._serve(holder, Mandate(self._key, holder.create_revision, lease_id))

    def _serve(self, holder: KeyValue, mandate: Mandate) -> None:
        """One term, to its end."""
        with self._lock:
            has_resigned = self._stopped.is_set()
            if not has_resigned:
                self._mandate = mandate
        if has_resigned:  # while etcd was making us the leader
            self._give_lead_back(mandate)
            return
        log.info("leading since revision %d", mandate.create_revision)
        self._tell(True)
        self._wait_for_end_of(holder)
        with self._lock:
            has_resigned = self._stopped.is_set()
            if not has_resigned:
                self._mandate = None
        if not has_resigned:
            log.warning("this agent is not the leader any more")
            self._tell(False)

    def _give_lead_back(self, mandate: Mandate) -> None:
        if not self._lease().is_held:
            return  # etcd is unreachable or has ended the term itself; do not wait for it
        try:
            is_ours = Compare.create_revision(mandate.key, mandate.create_revision)
            self._client.transact([is_ours], [Delete(mandate.key)])
        except EtcdError as error:
            log.warning("the lead could not be given back to etcd; it ends with this node's lease: %s", error)

    def _campaign(self, lease_id: int) -> KeyValue | None:
        """Take the lead if nobody has it. Returns the leader's key; None if it could not be read."""
        try:
            result = self._client.transact(
                [Compare.absent(self._key)],
                [Put(self._key, self._value, lease_id), Get(self._key)],
                [Get(self._key)],
            )
            self._attempts.succeeded()
            return result.reads[-1][0]
        except AmbiguousError:
            try:
                return self._client.get(self._key)
            except EtcdError as error:
                self._complain(error)
        except ClientClosedError:
            self._stopped.set()
        except LeaseLostError:
            log.info("this node has no lease to lead under; it stands for the lead again when it has one")
        except EtcdError as error:
            self._complain(error)
        return None

    def _complain(self, error: EtcdError) -> None:
        if self._attempts.failed(time.monotonic(), error):
            log.warning("this node could not stand for the lead, and tries again: %s", error)

    def _wait_for_end_of(self, holder: KeyValue) -> None:
        """Wait until the mirror, once it is at least as new as `holder`, does not show that term any more."""

        def has_ended(seen: Snapshot) -> bool:
            if self._stopped.is_set():
                return True
            now = seen.get(self._key)
            return seen.revision >= holder.mod_revision and (
                now is None or now.create_revision != holder.create_revision
            )

        if not self._mirror.wait_for(has_ended, None):  # the mirror was closed first
            self._stopped.wait(_RETRY_S)

    def _tell(self, is_leader: bool) -> None:
        try:
            self._on_change(is_leader)
        except Exception:
            log.exception("the leadership callback failed")
