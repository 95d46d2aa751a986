"""A copy of one key prefix in memory, kept up to date by a watch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.values import Event, KeyValue

log = logging.getLogger(__name__)


class Snapshot(Mapping[str, KeyValue]):
    """All keys of the prefix as they were at one revision of etcd. Never changes."""

    __slots__ = ("_entries", "revision")

    def __init__(self, entries: dict[str, KeyValue], revision: int) -> None:
        self._entries = entries
        self.revision = revision

    def __getitem__(self, key: str) -> KeyValue:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def is_older_than(self, other: Snapshot) -> bool:
        """Whether `other` shows something later (or etcd with new data): the predicate to wait for any change."""
        return other.revision != self.revision

    def under(self, prefix: str) -> dict[str, KeyValue]:
        """What follows `prefix` in the key -> value, for every key below it, in key order."""
        return {
            key.removeprefix(prefix): self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)
        }

    def applying(self, events: Sequence[Event], revision: int) -> Snapshot:
        entries = dict(self._entries)
        for event in events:
            if event.is_put:
                entries[event.kv.key] = event.kv
            else:
                entries.pop(event.kv.key, None)
        return Snapshot(entries, revision)


class Mirror:
    """Follows every key under `prefix`. Safe to use from several threads.

    on_change(): called, from the watch's thread, after the copy has changed. It must not block for long.

    Raises:
        EtcdError: etcd does not answer now. Later outages are waited out; see is_connected.
    """

    def __init__(self, client: EtcdClient, prefix: str, on_change: Callable[[], None] = lambda: None) -> None:
        self._client = client
        self._prefix = prefix
        self._on_change = on_change
        self._changed = threading.Condition()
        self._closed = False
        self._snapshot = self._list()
        self._watch = client.watch_prefix(prefix, self._snapshot.revision + 1, self._apply, self._relist)

    def snapshot(self) -> Snapshot:
        """The newest consistent copy. While etcd is away, the last one."""
        return self._snapshot

    @property
    def is_connected(self) -> bool:
        """Whether the copy is being updated now."""
        return self._watch.is_connected

    @property
    def connected_for_s(self) -> float:
        """For how many seconds it has been updated without interruption; 0 while it is not. A new leader believes in
        lease expiries only after one lease time of this."""
        return self._watch.connected_for_s

    @property
    def last_heard_monotonic(self) -> float:
        """When etcd was last heard from, in time.monotonic() seconds."""
        return self._watch.last_heard_monotonic

    def wait_for(self, predicate: Callable[[Snapshot], bool], timeout_s: float | None) -> bool:
        """Wait until `predicate` holds of the copy; whether it does. False at once when the mirror is closed.

        timeout_s: None waits without limit.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                if predicate(self._snapshot):
                    return True
                remaining_s = None if deadline is None else deadline - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    return False
                self._changed.wait(remaining_s)
            return False

    def poke(self) -> None:
        """Make every `wait_for` check its predicate again: something outside etcd that it reads has changed."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop following. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._watch.cancel()

    def _list(self) -> Snapshot:
        entries, revision = self._client.get_prefix(self._prefix)
        return Snapshot({kv.key: kv for kv in entries}, revision)

    def _apply(self, events: Sequence[Event], revision: int) -> None:
        self._replace(self._snapshot.applying(events, revision))

    def _relist(self) -> int:
        self._replace(self._list())
        return self._snapshot.revision + 1

    def _replace(self, snapshot: Snapshot) -> None:
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()
        try:
            self._on_change()
        except Exception:
            log.exception("the change callback of the etcd mirror of %s failed", self._prefix)
