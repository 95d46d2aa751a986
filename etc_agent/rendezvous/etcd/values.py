"""The values that callers exchange with the client: key values, events, transactions. Keys are text, values are
bytes."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.etcd.wire import message, range_end

Value = bytes | str
"""What may be written. Text is stored as UTF-8."""


def as_bytes(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as etcd holds it at one revision. Revisions count transactions of the whole etcd; version counts writes
    of this key since it was created. lease is 0 for a key without one."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int

    @staticmethod
    def from_wire(kv: Any) -> KeyValue:
        # Anyone may write under the prefix, so an undecodable key must not stop a watch.
        key = kv.key.decode("utf-8", "backslashreplace")
        return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)

    @property
    def text(self) -> str:
        """The value as text. Raises EtcdError when it is not UTF-8."""
        try:
            return self.value.decode()
        except UnicodeDecodeError:
            raise EtcdError(f"the value of {self.key} is not UTF-8 text") from None

    def json(self) -> Any:
        """The value parsed as JSON. Raises EtcdError when it is not JSON."""
        try:
            return json.loads(self.text)
        except ValueError:
            raise EtcdError(f"the value of {self.key} is not JSON: {self.text[:80]!r}") from None


@dataclass(frozen=True, slots=True)
class Event:
    """One change seen by a watch. For a deletion (`is_put` false) kv has only key and mod_revision."""

    is_put: bool
    kv: KeyValue

    @staticmethod
    def from_wire(event: Any) -> Event:
        return Event(event.type == 0, KeyValue.from_wire(event.kv))


class Target(enum.IntEnum):
    """The field of a key that a Compare looks at (etcd's own numbers)."""

    VERSION = 0
    CREATE_REVISION = 1
    MOD_REVISION = 2
    VALUE = 3


class Relation(enum.IntEnum):
    """How a Compare compares (etcd's own numbers)."""

    EQUAL = 0
    GREATER = 1
    LESS = 2
    NOT_EQUAL = 3


_OPERAND_FIELD = {
    Target.VERSION: "version",
    Target.CREATE_REVISION: "create_revision",
    Target.MOD_REVISION: "mod_revision",
    Target.VALUE: "value",
}


@dataclass(frozen=True, slots=True)
class Compare:
    """One condition of a transaction. A key that does not exist has version, create_revision and mod_revision 0.

    `range_end`: where it is given, the condition is on every key from `key` up to there.
    """

    key: str
    target: Target
    operand: int | bytes
    relation: Relation = Relation.EQUAL
    range_end: bytes = b""

    @staticmethod
    def absent(key: str) -> Compare:
        return Compare(key, Target.CREATE_REVISION, 0)

    @staticmethod
    def none_under(prefix: str) -> Compare:
        """No key begins with `prefix`."""
        return Compare(prefix, Target.CREATE_REVISION, 0, range_end=range_end(prefix.encode()))

    @staticmethod
    def present(key: str) -> Compare:
        return Compare(key, Target.CREATE_REVISION, 0, Relation.GREATER)

    @staticmethod
    def mod_revision(key: str, revision: int) -> Compare:
        return Compare(key, Target.MOD_REVISION, revision)

    @staticmethod
    def create_revision(key: str, revision: int) -> Compare:
        return Compare(key, Target.CREATE_REVISION, revision)

    @staticmethod
    def version(key: str, version: int) -> Compare:
        return Compare(key, Target.VERSION, version)

    @staticmethod
    def value(key: str, value: Value) -> Compare:
        return Compare(key, Target.VALUE, as_bytes(value))

    def to_wire(self) -> Any:
        return message(
            "Compare",
            result=int(self.relation),
            target=int(self.target),
            key=self.key.encode(),
            range_end=self.range_end,
            **{_OPERAND_FIELD[self.target]: self.operand},
        )


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key, under a lease unless `lease` is 0."""

    key: str
    value: Value
    lease: int = 0

    def to_wire(self) -> Any:
        put = message("PutRequest", key=self.key.encode(), value=as_bytes(self.value), lease=self.lease)
        return message("RequestOp", request_put=put)


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete one key; no error when it does not exist."""

    key: str

    def to_wire(self) -> Any:
        return message("RequestOp", request_delete_range=message("DeleteRangeRequest", key=self.key.encode()))


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    """Delete every key that starts with `prefix`."""

    prefix: str

    def to_wire(self) -> Any:
        key = self.prefix.encode()
        delete = message("DeleteRangeRequest", key=key, range_end=range_end(key))
        return message("RequestOp", request_delete_range=delete)


@dataclass(frozen=True, slots=True)
class Get:
    """Read one key."""

    key: str

    def to_wire(self) -> Any:
        return message("RequestOp", request_range=message("RangeRequest", key=self.key.encode()))


@dataclass(frozen=True, slots=True)
class GetPrefix:
    """Read every key that starts with `prefix`, in key order."""

    prefix: str

    def to_wire(self) -> Any:
        key = self.prefix.encode()
        return message("RequestOp", request_range=message("RangeRequest", key=key, range_end=range_end(key)))


Op = Put | Delete | DeletePrefix | Get | GetPrefix


@dataclass(frozen=True, slots=True)
class TxnResult:
    """The result of a transaction. `reads` has one tuple per operation of the branch that ran, in order: what a Get or
    GetPrefix found, empty for others."""

    succeeded: bool
    revision: int
    reads: tuple[tuple[KeyValue, ...], ...]

    @staticmethod
    def from_wire(response: Any) -> TxnResult:
        reads = tuple(tuple(map(KeyValue.from_wire, op.response_range.kvs)) for op in response.responses)
        return TxnResult(response.succeeded, response.header.revision, reads)
