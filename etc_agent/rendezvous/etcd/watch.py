"""A watch that does not die: it survives restarts, failovers, hung members, expired tokens and compaction.

It resumes at the revision after the last *event*. etcd's progress answers only prove that the stream is alive: some
releases send them ahead of events that are still under way, so they do not move the point to resume from.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.etcd.quiet_grpc import grpc
from etc_agent.rendezvous.etcd.transport import Link, Method, Transport
from etc_agent.rendezvous.etcd.values import Event
from etc_agent.rendezvous.etcd.wire import message

log = logging.getLogger(__name__)

WATCH = Method("/etcdserverpb.Watch/Watch", "WatchResponse")
RANGE = Method("/etcdserverpb.KV/Range", "RangeResponse")

HEARTBEAT_S = 2.0
SILENCE_S = 6.0
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 1.0


class _StreamEnded(Exception):
    """The stream is over; open the next one."""


class Watch:
    """Events of a key range from `start_revision` on, in order, each exactly once.

    on_events(events, revision): called from the watch's own thread. All events of one revision come in one call.
    relist(): called from that thread when revisions are gone (compaction, etcd's data lost). It reads everything again
    and returns the revision to watch from. An EtcdError from it means that it is tried again later.
    """

    def __init__(
        self,
        transport: Transport,
        key: bytes,
        range_end: bytes,
        start_revision: int,
        on_events: Callable[[Sequence[Event], int], None],
        relist: Callable[[], int],
        *,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._transport = transport
        self._key, self._range_end = key, range_end
        self._next_revision = start_revision
        self._on_events, self._relist = on_events, relist
        self._heartbeat_s, self._silence_s = heartbeat_s, silence_s
        self._cancelled = threading.Event()
        self._call: Any = None
        self._connected_since: float | None = None
        self._last_heard = self._silent_since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Whether the stream is open and was heard from recently."""
        return self.connected_for_s > 0

    @property
    def connected_for_s(self) -> float:
        """For how many seconds the stream has been open without interruption; 0 while it is not."""
        since, now = self._connected_since, time.monotonic()
        if since is None or now - self._last_heard >= self._silence_s:
            return 0.0
        return max(now - since, 1e-9)

    @property
    def last_heard_monotonic(self) -> float:
        """When etcd last sent anything on this watch, in time.monotonic() seconds."""
        return self._last_heard

    def cancel(self) -> None:
        """Stop. No callback starts after this returns (unless it is called from a callback). Idempotent."""
        self._cancelled.set()
        call = self._call
        if call is not None:
            call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        while not self._is_over:
            before = self._silent_since
            link: Link | None = None
            try:
                link = self._transport.link(time.monotonic() + self._transport.timeout_s)
                self._follow(link)
            except _StreamEnded as error:
                reason = str(error)
            except grpc.RpcError as error:
                try:
                    reason = self._transport.failed(link, error) if link else ""
                except EtcdError as refusal:
                    reason = str(refusal)
            except (EtcdError, ValueError) as error:  # ValueError: grpc raises it for a closed channel
                reason = str(error)
            self._connected_since = None
            if self._is_over:
                return
            if self._silent_since != before:
                delay_s = _FIRST_DELAY_S
            log.debug("etcd watch of %s broke (%s); resuming at %d", self._key, reason, self._next_revision)
            self._cancelled.wait(delay_s)
            delay_s = min(_LONGEST_DELAY_S, 2 * delay_s)

    @property
    def _is_over(self) -> bool:
        return self._cancelled.is_set() or self._transport.is_closed

    def _follow(self, link: Link) -> None:
        """Read one stream to its end. Always raises."""
        ended = threading.Event()
        self._silent_since = time.monotonic()
        call = self._transport.open_stream(link, WATCH, self._requests(ended), [("hasleader", "true")])
        self._call = call
        try:
            if self._cancelled.is_set():
                raise _StreamEnded("cancelled")
            pending: list[Any] = []
            for answer in call:
                if self._cancelled.is_set():
                    break
                self._last_heard = self._silent_since = time.monotonic()
                if answer.canceled:
                    self._handle_cancellation(link, answer)
                if answer.created:
                    self._check_history(answer.header.revision)
                    self._connected_since = time.monotonic()
                pending.extend(answer.events)
                if pending and not answer.fragment:
                    events, pending = tuple(map(Event.from_wire, pending)), []
                    self._deliver(events, answer.header.revision)
            raise _StreamEnded("etcd closed the stream")
        finally:
            ended.set()
            call.cancel()
            self._call = None

    def _requests(self, ended: threading.Event) -> Iterator[Any]:
        """The create request, then a progress request every heartbeat. Runs in a thread of grpc's. It cancels a stream
        that does not answer, because the other thread is blocked reading from it."""
        create = message(
            "WatchCreateRequest",
            key=self._key,
            range_end=self._range_end,
            start_revision=self._next_revision,
            fragment=True,
        )
        yield message("WatchRequest", create_request=create)
        while not ended.wait(self._heartbeat_s):
            if time.monotonic() - self._silent_since > self._silence_s:
                call = self._call
                if call is not None:
                    call.cancel()
                return
            yield message("WatchRequest", progress_request=message("WatchProgressRequest"))

    def _deliver(self, events: Sequence[Event], revision: int) -> None:
        try:
            self._on_events(events, revision)
        except Exception:
            log.exception("a callback of the etcd watch of %s failed", self._key)
        self._next_revision = events[-1].kv.mod_revision + 1

    def _handle_cancellation(self, link: Link, answer: Any) -> None:
        if answer.compact_revision:
            self._next_revision = self._relist()
            raise _StreamEnded(f"revisions before {answer.compact_revision} are compacted")
        # etcd 3.4 says "permission denied" of a watch whose token has expired.
        if "auth token" in answer.cancel_reason or "permission denied" in answer.cancel_reason.lower():
            self._transport.forget_token(link)
        else:
            self._transport.go_to_next_endpoint(link)
        raise _StreamEnded(answer.cancel_reason or "cancelled by etcd")

    def _check_history(self, member_revision: int) -> None:
        """Check that etcd's revision is not behind what was seen already: one member may lag, the cluster cannot unless
        its data were lost. A watch from a revision in the future would never deliver an event."""
        if member_revision + 1 >= self._next_revision:
            return
        answer = self._transport.call(RANGE, message("RangeRequest", key=self._key, count_only=True))
        if answer.header.revision + 1 < self._next_revision:
            self._next_revision = self._relist()
            raise _StreamEnded("etcd has lost its data")
