"""The leader's writes, fenced so that a former leader which was stalled can write nothing.

Each write is one transaction that compares the create_revision of this agent's `leader` key and the mod_revision of
`current`. If its answer is lost, the keys are read again. If the write has not been applied then, it may still be under
way and be applied after it was repeated. To make that harmless, each attempt also compares the mod_revision of one key
that it writes (the *witness*), so at most one attempt can succeed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from etc_agent.rendezvous.election import Mandate
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import AmbiguousError, EtcdUnavailable, FencedError
from etc_agent.rendezvous.etcd.values import (
    Compare,
    Delete,
    DeletePrefix,
    Get,
    KeyValue,
    Op,
    Put,
    TxnResult,
    Value,
    as_bytes,
)


@dataclass(frozen=True, slots=True)
class _Witness:
    """A key that a write puts, and its mod_revision before the write."""

    key: str
    mod_revision: int


class FencedWriter:
    """The writes of one term as the leader. Safe to use from several threads; writes are serialised.

    mandate: the term. current_key: the key of `current`.

    Raises:
        FencedError: the term is already over.
        EtcdError: etcd does not answer.
    """

    def __init__(self, client: EtcdClient, mandate: Mandate, current_key: str) -> None:
        self._client = client
        self._mandate = mandate
        self._current_key = current_key
        self._lock = threading.Lock()
        self._current: KeyValue | None = None
        self.reload()

    @property
    def current(self) -> KeyValue | None:
        """`current` as this writer last read or wrote it: what the next write compares against."""
        return self._current

    def reload(self) -> KeyValue | None:
        """Read `current` again; later writes compare against what was read."""
        with self._lock:
            result = self._read(())
            self._check_term(result)
            self._current = _current(result)
            return self._current

    def write(
        self, puts: Mapping[str, Value], deletes: Sequence[Delete | DeletePrefix] = (), timeout_s: float | None = None
    ) -> int:
        """Apply everything at one revision, which is returned, or nothing.

        puts: key -> value, at least one; `current` among them where it changes.
        timeout_s: how long to keep trying while etcd gives no clear answer; None takes the client's.

        Raises:
            FencedError: another agent leads, or `current` differs from what this writer knows. Nothing was written, or
                (only if etcd's answer was lost) what was written has been replaced since.
            EtcdUnavailable: etcd did not answer; AmbiguousError if the write may have been applied.
        """
        deadline = time.monotonic() + (self._client.timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            witness = self._witness(puts)
            guards = [
                Compare.create_revision(self._mandate.key, self._mandate.create_revision),
                Compare.mod_revision(self._current_key, _revision(self._current)),
                Compare.mod_revision(witness.key, witness.mod_revision),
            ]
            ops: list[Op] = [Put(key, value) for key, value in puts.items()]
            ops += deletes
            ops.append(Get(self._current_key))
            is_first = True
            while True:
                try:
                    result = self._client.transact(guards, ops, self._reads(puts))
                except AmbiguousError:
                    is_first = False
                    seen = self._read_again(puts, deadline)
                    landed = self._landed(puts, witness, seen)
                    if landed is not None:
                        return landed
                    self._check_term(seen)
                    if time.monotonic() >= deadline:
                        raise
                    continue
                if result.succeeded:
                    self._current = result.reads[-1][0] if result.reads[-1] else None
                    return result.revision
                landed = None if is_first else self._landed(puts, witness, result)
                if landed is not None:
                    return landed
                self._check_term(result)
                raise FencedError(
                    f"{self._current_key} or {witness.key} has changed under this writer; reload before writing again"
                )

    def _witness(self, puts: Mapping[str, Value]) -> _Witness:
        if self._current_key in puts:
            return _Witness(self._current_key, _revision(self._current))
        key = next(iter(puts))
        return _Witness(key, _revision(self._client.get(key)))

    def _reads(self, keys: Mapping[str, Value] | Sequence[str]) -> list[Op]:
        """The keys to read, in the order that _current, _check_term and _landed rely on."""
        return [Get(self._mandate.key), Get(self._current_key), *(Get(key) for key in keys)]

    def _read(self, keys: Mapping[str, Value] | Sequence[str]) -> TxnResult:
        """Leader, current and `keys`, all at one revision. Repeating a read is always safe."""
        deadline = time.monotonic() + self._client.timeout_s
        while True:
            try:
                return self._client.transact([], self._reads(keys))
            except AmbiguousError:
                if time.monotonic() >= deadline:
                    raise EtcdUnavailable(f"etcd does not answer at {', '.join(self._client.endpoints)}") from None

    def _read_again(self, puts: Mapping[str, Value], deadline: float) -> TxnResult:
        while True:
            try:
                return self._read(puts)
            except EtcdUnavailable:
                if time.monotonic() >= deadline:
                    raise AmbiguousError(
                        "etcd fell silent during a write of the leader; it may or may not have been applied"
                    ) from None

    def _landed(self, puts: Mapping[str, Value], witness: _Witness, seen: TxnResult) -> int | None:
        """The revision at which the write was applied, or None if it was not: every key has the written value from one
        and the same revision, later than the witness's."""
        found = [read[0] if read else None for read in seen.reads[2:]]
        revisions = {_revision(kv) for kv in found}
        is_ours = all(
            kv is not None and kv.value == as_bytes(value) for kv, value in zip(found, puts.values(), strict=True)
        )
        if not is_ours or len(revisions) != 1 or min(revisions) <= witness.mod_revision:
            return None
        self._current = _current(seen)
        return min(revisions)

    def _check_term(self, seen: TxnResult) -> None:
        leader = seen.reads[0][0] if seen.reads[0] else None
        if leader is None or leader.create_revision != self._mandate.create_revision:
            raise FencedError(
                f"this agent is not the leader any more: its term began at revision {self._mandate.create_revision}, "
                + (f"the present leader's at {leader.create_revision}" if leader else "and now there is no leader")
            )


def _current(seen: TxnResult) -> KeyValue | None:
    return seen.reads[1][0] if seen.reads[1] else None


def _revision(kv: KeyValue | None) -> int:
    return kv.mod_revision if kv else 0
