"""A thin synchronous client of etcd v3: keys, transactions, leases, watches. Safe to use from several threads.

Never fork beside it (subprocess and spawn are fine): grpc's threads do not survive a fork.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from etc_agent.rendezvous.etcd.errors import EtcdError, LeaseLostError
from etc_agent.rendezvous.etcd.transport import Method, Tls, Transport
from etc_agent.rendezvous.etcd.values import (
    Compare,
    Event,
    Get,
    GetPrefix,
    KeyValue,
    Op,
    TxnResult,
    Value,
    as_bytes,
)
from etc_agent.rendezvous.etcd.watch import HEARTBEAT_S, RANGE, SILENCE_S, Watch
from etc_agent.rendezvous.etcd.wire import message, range_end

__all__ = ["EtcdClient", "Tls"]

_PUT = Method("/etcdserverpb.KV/Put", "PutResponse")
_DELETE_RANGE = Method("/etcdserverpb.KV/DeleteRange", "DeleteRangeResponse")
_TXN = Method("/etcdserverpb.KV/Txn", "TxnResponse")
_COMPACT = Method("/etcdserverpb.KV/Compact", "CompactionResponse")
_LEASE_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", "LeaseGrantResponse")
_LEASE_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", "LeaseRevokeResponse")
_LEASE_KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", "LeaseKeepAliveResponse", is_streaming=True)
_LEASE_TIME_TO_LIVE = Method("/etcdserverpb.Lease/LeaseTimeToLive", "LeaseTimeToLiveResponse")
_MEMBER_LIST = Method("/etcdserverpb.Cluster/MemberList", "MemberListResponse")

MOST_READS = 128
"""Operations that etcd admits in one transaction, by default."""


class EtcdClient:
    """etcd at `endpoints` ("host:port" each, of one cluster).

    timeout_s: the longest time that one operation may take, over all endpoints and attempts.
    Every operation raises EtcdUnavailable when no endpoint answers in that time, EtcdAuthError when etcd rejects the
    credentials, and EtcdError when it refuses the request.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: Tls | None = None,
        user: str | None = None,
        password: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self._transport = Transport(endpoints, tls=tls, user=user, password=password, timeout_s=timeout_s)

    def __enter__(self) -> EtcdClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """host:port of each member we know."""
        return self._transport.addresses

    @property
    def timeout_s(self) -> float:
        return self._transport.timeout_s

    def close(self) -> None:
        """End every call and watch, and drop the connections. Idempotent."""
        self._transport.close()

    # Keys.

    def get(self, key: str) -> KeyValue | None:
        """The key in its present state, as the cluster's majority has it, or None."""
        answer = self._transport.call(RANGE, message("RangeRequest", key=key.encode()))
        return KeyValue.from_wire(answer.kvs[0]) if answer.kvs else None

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """Every key that starts with `prefix`, in key order, and the revision at which they were read."""
        key = prefix.encode()
        answer = self._transport.call(RANGE, message("RangeRequest", key=key, range_end=range_end(key)))
        return [KeyValue.from_wire(kv) for kv in answer.kvs], answer.header.revision

    def read(self, ops: Sequence[Get | GetPrefix]) -> TxnResult:
        """Several reads at one revision, at most `MOST_READS`: one tuple of keys for each, in order."""
        request = message("TxnRequest", success=[op.to_wire() for op in ops])
        return TxnResult.from_wire(self._transport.call(_TXN, request))

    def keys_between(self, start: str, end: bytes, limit: int) -> list[str]:
        """The first `limit` keys from `start` on and before `end`, in key order, without their values."""
        request = message("RangeRequest", key=start.encode(), range_end=end, limit=limit, keys_only=True)
        return [KeyValue.from_wire(kv).key for kv in self._transport.call(RANGE, request).kvs]

    def put(self, key: str, value: Value, lease: int = 0) -> int:
        """Write the key; returns the revision. After a lost answer the write is repeated.

        Raises:
            LeaseLostError: the lease does not exist.
        """
        request = message("PutRequest", key=key.encode(), value=as_bytes(value), lease=lease)
        with _LeaseErrors(lease):
            return self._transport.call(_PUT, request).header.revision

    def delete(self, key: str) -> int:
        """Delete the key if it exists; returns the revision."""
        return self._transport.call(_DELETE_RANGE, message("DeleteRangeRequest", key=key.encode())).header.revision

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with `prefix`; returns the revision."""
        key = prefix.encode()
        request = message("DeleteRangeRequest", key=key, range_end=range_end(key))
        return self._transport.call(_DELETE_RANGE, request).header.revision

    def transact(
        self, compares: Sequence[Compare], success_ops: Sequence[Op], failure_ops: Sequence[Op] = ()
    ) -> TxnResult:
        """Apply success_ops at one revision if every comparison holds, else failure_ops.

        Raises:
            AmbiguousError: the answer was lost, so it may or may not have been applied. It is never repeated here.
            LeaseLostError: a put names a lease that does not exist; nothing was applied.
        """
        request = message(
            "TxnRequest",
            compare=[compare.to_wire() for compare in compares],
            success=[op.to_wire() for op in success_ops],
            failure=[op.to_wire() for op in failure_ops],
        )
        with _LeaseErrors(None):
            return TxnResult.from_wire(self._transport.call(_TXN, request, is_repeatable=False))

    def compact(self, revision: int) -> None:
        """Forget history before `revision`. Watches that need it list again."""
        self._transport.call(_COMPACT, message("CompactionRequest", revision=revision))

    def watch_prefix(
        self,
        prefix: str,
        start_revision: int,
        on_events: Callable[[Sequence[Event], int], None],
        relist: Callable[[], int],
        *,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
    ) -> Watch:
        """Follow every key that starts with `prefix` from `start_revision` on; see Watch for the callbacks.

        heartbeat_s: how often etcd is asked whether the stream is alive; silence_s: after how long without any answer
            the
        watch goes to another endpoint.
        """
        key = prefix.encode()
        return Watch(
            self._transport,
            key,
            range_end(key),
            start_revision,
            on_events,
            relist,
            heartbeat_s=heartbeat_s,
            silence_s=silence_s,
        )

    # Leases. Times are whole seconds, as in etcd.

    def grant_lease(self, ttl_s: int) -> int:
        """A new lease; returns its id. The client chooses the id, so that a repeated request does not create a second
        one."""
        lease = secrets.randbits(62) | 1
        try:
            answer = self._transport.call(_LEASE_GRANT, message("LeaseGrantRequest", TTL=ttl_s, ID=lease))
        except EtcdError as error:
            if "lease already exists" not in str(error):
                raise
            return lease
        if answer.error:
            raise EtcdError(f"etcd refused a lease of {ttl_s} s: {answer.error}")
        return answer.ID

    def keep_lease_alive(self, lease: int, timeout_s: float | None = None) -> int:
        """Renew the lease once; returns its remaining time in seconds.

        Raises:
            LeaseLostError: it does not exist any more.
        """
        request = message("LeaseKeepAliveRequest", ID=lease)
        ttl_s = self._transport.call(_LEASE_KEEP_ALIVE, request, timeout_s=timeout_s).TTL
        if ttl_s <= 0:
            raise LeaseLostError(f"etcd does not know lease {lease:x} any more")
        return ttl_s

    def revoke_lease(self, lease: int, timeout_s: float | None = None) -> None:
        """End the lease and delete its keys. No error if it does not exist any more."""
        try:
            self._transport.call(_LEASE_REVOKE, message("LeaseRevokeRequest", ID=lease), timeout_s=timeout_s)
        except EtcdError as error:
            if "requested lease not found" not in str(error):
                raise

    def lease_time_to_live(self, lease: int) -> int | None:
        """Seconds the lease has left, or None when it does not exist."""
        ttl_s = self._transport.call(_LEASE_TIME_TO_LIVE, message("LeaseTimeToLiveRequest", ID=lease)).TTL
        return None if ttl_s < 0 else ttl_s

    def member_names(self, timeout_s: float | None = None) -> list[str]:
        """The names of the cluster's members."""
        answer = self._transport.call(_MEMBER_LIST, message("MemberListRequest"), timeout_s=timeout_s)
        return [member.name for member in answer.members]


class _LeaseErrors:
    """Turns etcd's "lease not found" into LeaseLostError."""

    def __init__(self, lease: int | None) -> None:
        self._lease = lease

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, EtcdError) and "requested lease not found" in str(error):
            which = "of this write" if self._lease is None else f"{self._lease:x}"
            raise LeaseLostError(f"etcd does not know the lease {which} any more") from None
