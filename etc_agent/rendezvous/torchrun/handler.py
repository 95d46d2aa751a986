"""`torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint=HOST:PORT[,HOST:PORT...]`: torch's rendezvous over etcd v3.

Compared with torch's own: surviving nodes learn of a node that has died (within its lease time) and of one that has
given up; the order of surviving nodes never changes; every generation has a store of its own on one of its nodes, so
that nobody meets stale keys or a stale address; newcomers are admitted together, after they have settled, and training
continues until then.

What `--rdzv-conf` takes is in settings.py; the rules of who meets whom are in roster.py.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from etc_agent.rendezvous.addresses import node_name, reachable_address
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import AmbiguousError, EtcdError, EtcdUnavailable
from etc_agent.rendezvous.etcd.values import Compare, Put
from etc_agent.rendezvous.keys import DEFAULT_PREFIX, JobKeys
from etc_agent.rendezvous.membership import Membership
from etc_agent.rendezvous.mirror import Mirror, Snapshot
from etc_agent.rendezvous.torchrun.roster import Ending, Node, Roster, View, next_roster, num_nodes_waiting
from etc_agent.rendezvous.torchrun.settings import Settings, client_from_config
from etc_agent.torch_store import serve_store

log = logging.getLogger(__name__)

BACKEND = "etcd-v3"

_STORE_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 20.0
_MEETING_POLL_S = 0.02
_RETRY_S = 0.5


def create_handler(params: RendezvousParameters) -> EtcdV3RendezvousHandler:
    """The handler for torchrun's parameters.

    Raises:
        RendezvousConnectionError: etcd does not answer.
        EtcdError, ValueError: a parameter is wrong.
    """
    keys = JobKeys(params.run_id, params.get("prefix", DEFAULT_PREFIX))
    settings = Settings.from_config(params.min_nodes, params.max_nodes, params.config)
    client = client_from_config(params.endpoint, params.config)
    address = params.local_addr or reachable_address(client.endpoints)
    try:
        return EtcdV3RendezvousHandler(client, keys, settings, address)
    except EtcdUnavailable as error:
        client.close()
        raise RendezvousConnectionError(str(error)) from None
    except BaseException:
        client.close()
        raise


class EtcdV3RendezvousHandler(RendezvousHandler):
    """One node's part in the rendezvous of one run. Owns `client`. `address`: where other nodes reach this one."""

    def __init__(self, client: EtcdClient, keys: JobKeys, settings: Settings, address: str) -> None:
        self._client, self._keys, self._settings = client, keys, settings
        self._address = address
        self._name = f"{node_name(address)}-{secrets.token_hex(6)}"
        self._lock = threading.Lock()
        self._known_newcomers: frozenset[str] = frozenset()
        self._last_arrival = time.monotonic()
        self._membership: Membership | None = None
        self._generation = 0
        self._unused_server: TCPStore | None = None
        self._serving: TCPStore | None = None
        self._mirror = Mirror(client, keys.torchrun_prefix, self._observe)
        view = self._view()
        # A run of the same name may have ended here earlier; that ending does not concern this run.
        self._stale_roster_revision = (
            view.roster_revision if view.roster.ending is not None and not view.live_members else 0
        )
        atexit.register(self._leave)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._keys.run_id

    @property
    def use_agent_store(self) -> bool:
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until a generation that includes this node has met.

        Raises:
            RendezvousClosedError: the run has ended, or fails while this node waits.
            SystemExit: the run succeeds while this node waits, so this process has nothing left to do (exit code 0).
            RendezvousTimeoutError: it took longer than join_timeout.
            RendezvousConnectionError: etcd did not answer for that long.
        """
        deadline = time.monotonic() + self._settings.join_timeout_s
        try:
            if self._ending() is not None:
                raise RendezvousClosedError(
                    f"run {self._keys.run_id} has ended; wait until its last node has gone, or choose another --rdzv-id"
                )
            while True:
                waits_after = self._arrive(deadline)
                roster = self._wait_for_roster(waits_after, deadline)
                info = self._meet(roster, deadline)
                if info is not None:
                    break
        except Exception as error:
            self._record(f"{type(error).__name__}: {error}", NodeState.FAILED)
            raise
        self._generation = roster.generation
        self._say_busy()
        self._record(f"{self._name} is rank {info.rank} of {info.world_size} in generation {roster.generation}")
        return info

    def num_nodes_waiting(self) -> int:
        """How many nodes are a reason to meet again: newcomers, and members that have died or given up."""
        view = self._view()
        self._note_newcomers(view)
        return num_nodes_waiting(
            view,
            self._name,
            self._generation,
            self._settings.max_nodes,
            are_newcomers_settled=self._settle_left_s() <= 0,
        )

    def is_closed(self) -> bool:
        return self._ending() is not None

    def set_closed(self) -> None:
        self._end(Ending.FINISHED)

    def shutdown(self) -> bool:
        """End the run for everybody and leave. torchrun calls it when its agent is done. If an exception is being
        handled the run has failed, and the other nodes are told to stop waiting for this one."""
        try:
            self._end(Ending.FINISHED if sys.exc_info()[0] is None else Ending.FAILED)
            return True
        except EtcdError as error:
            log.warning("the end of run %s could not be recorded: %s", self._keys.run_id, error)
            return False
        finally:
            self._leave()

    # Waiting for the others.

    def _arrive(self, deadline: float) -> int:
        """Publish that this node waits, and its fresh store. Returns the generation after which it waits."""
        if self._unused_server is None:
            self._unused_server = serve_store(self._address, _STORE_TIMEOUT_S)
        waits_after = self._view().roster.generation
        node = self._node(self._unused_server.port, waits_after).to_json()
        while True:
            try:
                if self._membership is None:
                    key = self._keys.torchrun_node(self._name)
                    self._membership = Membership(self._client, key, node, ttl_s=self._settings.lease_ttl_s)
                else:
                    self._membership.update(node)
                return waits_after
            except EtcdUnavailable as error:
                if time.monotonic() >= deadline:
                    raise RendezvousConnectionError(str(error)) from None
                log.warning("%s", error)
                time.sleep(_RETRY_S)

    def _say_busy(self) -> None:
        """Publish that workers run here, so that a repeated registration does not look like a newcomer's."""
        assert self._membership is not None
        try:
            self._membership.update(self._node(0, None).to_json())
        except EtcdUnavailable as error:
            log.info("%s", error)  # the next registration carries it

    def _node(self, store_port: int, waits_after: int | None) -> Node:
        return Node(self._name, 0, self._address, store_port, self._settings.node_rank, waits_after)

    def _wait_for_roster(self, waits_after: int, deadline: float) -> Roster:
        while True:
            snapshot = self._mirror.snapshot()
            view = self._view(snapshot)
            self._note_newcomers(view)
            ending = self._ending(view)
            if ending is Ending.FAILED:
                raise RendezvousClosedError(f"run {self._keys.run_id} has failed on another node")
            if ending is Ending.FINISHED:
                if self._generation:
                    raise RendezvousClosedError(f"run {self._keys.run_id} has ended on another node")
                # Torch has RendezvousGracefulExitError for this, but its launcher then fails on the missing result.
                log.info("run %s has ended; this node waited for a place and was not needed", self._keys.run_id)
                raise SystemExit(0)
            if self._name in view.roster.members and view.roster.generation > waits_after:
                return view.roster
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise RendezvousTimeoutError(self._who_is_missing(view))
            ready_in_s = self._ready_in_s(view)
            if ready_in_s == 0 and self._propose(view):
                # In a moment the mirror will show it, or whoever was faster.
                ready_in_s = None
            elif ready_in_s == 0:
                ready_in_s = _RETRY_S
            wait_s = remaining_s if ready_in_s is None else min(remaining_s, ready_in_s)
            self._mirror.wait_for(snapshot.is_older_than, wait_s)

    def _ready_in_s(self, view: View) -> float | None:
        """In how many seconds this node should write the next roster, if nothing changes; None: it should not."""
        scribe = view.scribe
        if scribe is None or scribe.name != self._name or not view.is_everybody_waiting:
            return None
        num_waiting = len(view.waiting)
        if num_waiting < self._settings.min_nodes:
            return None
        if num_waiting >= self._settings.max_nodes or not view.newcomers:
            return 0.0
        return max(0.0, self._settle_left_s())

    def _propose(self, view: View) -> bool:
        """Write the roster that follows `view`. Returns False to try again."""
        roster = next_roster(view, self._settings.max_nodes)
        try:
            key = self._keys.torchrun_roster
            self._client.transact([Compare.mod_revision(key, view.roster_revision)], [Put(key, roster.to_json())])
        except AmbiguousError:
            return False  # if it has landed, the mirror will show it
        except EtcdUnavailable as error:
            log.warning("%s", error)
            return False
        return True

    def _who_is_missing(self, view: View) -> str:
        busy = [node.name for node in view.live_members if not view.is_waiting(node)]
        if busy:
            what = f"still busy: {', '.join(busy)}"
        else:
            what = f"{len(view.waiting)} nodes came, at least {self._settings.min_nodes} are needed"
        return f"run {self._keys.run_id} did not come together within {self._settings.join_timeout_s:g} s ({what})"

    # Meeting them.

    def _meet(self, roster: Roster, deadline: float) -> RendezvousInfo | None:
        """Join the store of this generation and wait for its other members there. None if one of them is lost:
        torchrun's next steps block on every member and cannot be interrupted, so members must be known to be
        present."""
        rank = roster.members.index(self._name)
        try:
            if rank == 0:
                server = backing = self._unused_server
            else:
                server, backing = None, self._connect(roster, deadline)
            if backing is None:
                return None
            store = PrefixStore(f"{BACKEND}/{self._keys.run_id}/{roster.generation}", backing)
            store.set(f"met/{rank}", "1")
            expected = [f"met/{other}" for other in range(len(roster.members))]
            while not store.check(expected):
                if self._has_broken(roster):
                    return None
                if time.monotonic() >= deadline:
                    raise RendezvousTimeoutError(f"generation {roster.generation} of {self._keys.run_id} did not meet")
                time.sleep(_MEETING_POLL_S)
        except DistError as error:
            log.info("generation %d lost its store: %s", roster.generation, error)
            return None
        self._serving = server  # closes the store of the previous generation
        if server is not None:
            self._unused_server = None
        bootstrap = (
            RendezvousStoreInfo(roster.address, roster.store_port)
            if self.use_agent_store
            else RendezvousStoreInfo.build(rank, store, local_addr=self._address)
        )
        return RendezvousInfo(store, rank, len(roster.members), bootstrap)

    def _connect(self, roster: Roster, deadline: float) -> TCPStore | None:
        end = min(deadline, time.monotonic() + _CONNECT_TIMEOUT_S)
        while True:
            try:
                store = TCPStore(
                    roster.address,
                    roster.store_port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=2),
                )
            except DistError:
                if self._has_broken(roster) or time.monotonic() >= end:
                    return None
                continue
            store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
            return store

    def _has_broken(self, roster: Roster) -> bool:
        """Whether this generation cannot meet any more: a member has died or waits again."""
        view = self._view()
        return view.roster.generation != roster.generation or any(
            name != self._name and (name not in view.nodes or view.is_waiting(view.nodes[name]))
            for name in roster.members
        )

    # What etcd holds.

    def _view(self, snapshot: Snapshot | None = None) -> View:
        seen = self._mirror.snapshot() if snapshot is None else snapshot
        found = seen.get(self._keys.torchrun_roster)
        nodes = {
            name: Node.from_key_value(name, kv) for name, kv in seen.under(self._keys.torchrun_nodes_prefix).items()
        }
        if found is None:
            return View(nodes)
        return View(nodes, Roster.from_key_value(found), found.mod_revision)

    def _ending(self, view: View | None = None) -> Ending | None:
        view = view or self._view()
        return None if view.roster_revision == self._stale_roster_revision else view.roster.ending

    def _observe(self) -> None:
        self._note_newcomers(self._view())

    def _note_newcomers(self, view: View) -> None:
        newcomers = frozenset(node.name for node in view.newcomers)
        with self._lock:
            if newcomers - self._known_newcomers:
                self._last_arrival = time.monotonic()
            self._known_newcomers = newcomers

    def _settle_left_s(self) -> float:
        with self._lock:
            return self._last_arrival + self._settings.settle_s - time.monotonic()

    def _end(self, ending: Ending) -> None:
        """Record that there will be no further generation.

        Raises:
            EtcdError: etcd does not answer.
        """
        key = self._keys.torchrun_roster
        while True:
            found = self._client.get(key)
            roster = Roster.from_key_value(found) if found else Roster()
            revision = found.mod_revision if found else 0
            if roster.ending is not None and revision != self._stale_roster_revision:
                return
            try:
                ended = replace(roster, ending=ending).to_json()
                if self._client.transact([Compare.mod_revision(key, revision)], [Put(key, ended)]).succeeded:
                    return
            except AmbiguousError:
                continue

    def _leave(self) -> None:
        atexit.unregister(self._leave)
        if self._membership is not None:
            self._membership.close()
        self._mirror.close()
        self._client.close()

    def _record(self, message: str, state: NodeState = NodeState.RUNNING) -> None:
        log.info("%s", message)
        construct_and_record_rdzv_event(
            run_id=self._keys.run_id, message=message, node_state=state, hostname=self._address, pid=os.getpid()
        )
