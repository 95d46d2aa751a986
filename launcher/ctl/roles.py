"""The least permissions in etcd that agents, administrators and onlookers of one job need."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etc_agent.rendezvous.etcd.wire import range_end
from etc_agent.rendezvous.keys import JobKeys

AUDIENCES = ("agent", "admin", "viewer")


@dataclass(frozen=True, slots=True)
class Permission:
    """`kind`: ``read``, ``write`` or ``readwrite``, on `key`, or on every key from `key` up to `end`. Of two on the
    same keys etcd keeps the last alone."""

    kind: str
    key: str
    end: str = ""

    @classmethod
    def under(cls, kind: str, prefix: str) -> Permission:
        return cls(kind, prefix, range_end(prefix.encode()).decode())


@dataclass(frozen=True, slots=True)
class Role:
    """One etcd role."""

    name: str
    permissions: Sequence[Permission]

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.name,
            "permissions": [
                {"type": each.kind, "key": each.key, "range_end": each.end} for each in self.permissions
            ],
        }

    def commands(self) -> list[str]:
        """etcdctl's commands that make the role."""
        grants = (
            ["etcdctl", "role", "grant-permission", self.name, each.kind, *filter(None, (each.key, each.end))]
            for each in self.permissions
        )
        return [shlex.join(words) for words in (["etcdctl", "role", "add", self.name], *grants)]


def role_for(audience: str, keys: JobKeys) -> Role:
    """The role of one of `AUDIENCES` in the job of `keys`.

    All may read what the job has. Agents write everything: also the requests of a dead run, which are removed when the
    run id is used again, and the cordons of repeat offenders. Administrators write requests, never what the leader
    decides. Leases need no permission of their own.
    """
    read = Permission.under("read", keys.root)
    permissions = {
        "agent": [Permission.under("readwrite", keys.root)],
        "admin": [
            read,
            *(Permission("write", key) for key in (keys.scale, keys.preview, keys.pause, keys.stop)),
            Permission.under("write", keys.drains_prefix), Permission.under("write", keys.cordons_prefix),
        ],
        "viewer": [read],
    }
    return Role(f"etc-run{keys.prefix.replace('/', '.')}.{keys.run_id}.{audience}", permissions[audience])
