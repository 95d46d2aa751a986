"""Testifies in etcd that an instance of a node has no workers any more, so that nobody waits for its lease.

The guardian runs this file as a program when its agent is gone (`main`). An agent that ends while the job continues
calls `testify` itself.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from etc_agent.agent.etcd import connect
from etc_agent.agent.settings import EtcdSettings
from etc_agent.reconfig.known.records import NodeRecord, Testimony
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import AmbiguousError, EtcdError
from etc_agent.rendezvous.etcd.values import Compare, Delete, KeyValue, Op, Put
from etc_agent.rendezvous.keys import JobKeys

logger = logging.getLogger(__name__)

KEPT_S = 600
"""For how long a testimony stays in etcd. Later a node that is gone is believed to be so without one, and a run of
which nobody is left is asked for survivors before it is replaced."""
_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """What the guardian's program needs to know. `instance`: of the node's record. `limit_s`: for how long after the
    agent's end it tries; the lease has run out then. `timeout_s`: for one request to etcd."""

    etcd: EtcdSettings
    run_id: str
    node: str
    instance: str
    limit_s: float
    timeout_s: float

    def to_json(self) -> dict[str, Any]:
        """Contains the password: for pipes only."""
        etcd = {**asdict(self.etcd), **{name: _absolute(getattr(self.etcd, name)) for name in _FILES}}
        return {**asdict(self), "etcd": etcd}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        etcd = dict(value["etcd"])
        etcd.update({name: Path(path) for name in _FILES if (path := etcd[name]) is not None})
        return cls(**{**value, "etcd": EtcdSettings(**{**etcd, "endpoints": tuple(etcd["endpoints"])})})


_FILES = ("ca_file", "cert_file", "key_file")


def _absolute(path: Path | None) -> str | None:
    return str(Path(path).absolute()) if path is not None else None


def testify(client: EtcdClient, keys: JobKeys, node: str, instance: str, deadline: float) -> None:
    """Write that the workers of this instance of `node` have ended, and remove its record, and the lead if it has it.

    Tried again while etcd does not answer, until time.monotonic() is `deadline`.

    Raises:
        EtcdError: the last attempt failed.
    """
    while True:
        try:
            if _attempt(client, keys, node, instance):
                return
        except EtcdError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_AGAIN_S)


def _attempt(client: EtcdClient, keys: JobKeys, node: str, instance: str) -> bool:
    """Whether nothing is left to do."""
    found = client.get(keys.node(node))
    if found is not None and _instance_of(found) != instance:
        return True  # another agent has this name, and is asked for nothing
    conditions, ops, leases = [_unchanged(keys.node(node), found)], list[Op](), []
    if found is not None:
        ops.append(Delete(found.key))
        leases.append(found.lease)
        leader = client.get(keys.leader)
        if leader is not None and leader.lease == found.lease:
            conditions.append(_unchanged(leader.key, leader))
            ops.append(Delete(leader.key))
    kept = client.grant_lease(KEPT_S)
    ops.append(Put(keys.gone(node), json.dumps(Testimony(instance).to_json()), kept))
    try:
        is_done = client.transact(conditions, ops).succeeded
    except AmbiguousError:
        return False  # the second time it writes the same
    for lease in leases if is_done else ():
        client.revoke_lease(lease)
    return is_done


def _unchanged(key: str, found: KeyValue | None) -> Compare:
    return Compare.mod_revision(key, found.mod_revision if found else 0)


def _instance_of(found: KeyValue) -> str:
    try:
        return NodeRecord.from_json(json.loads(found.value)).instance
    except (ValueError, KeyError, TypeError):
        return ""


def main() -> None:
    """Read a `Case` from standard input, then wait for the line that says that all workers have ended, and testify."""
    logging.basicConfig(format="etc-run: %(message)s", level=logging.INFO)
    logging.getLogger("etc_agent.rendezvous").setLevel(logging.WARNING)
    began = time.monotonic()
    case = Case.from_json(json.loads(sys.stdin.readline()))
    keys = JobKeys(case.run_id, case.etcd.prefix)
    with connect(case.etcd, case.timeout_s) as client:
        with suppress(EtcdError):
            client.get(keys.node(case.node))  # connects, while the workers end
        if sys.stdin.readline().strip() != "gone":
            return
        try:
            testify(client, keys, case.node, case.instance, began + case.limit_s)
        except EtcdError as error:
            why = f"and etcd has not heard of it, so the other nodes wait for its lease: {error}"
            logger.error("the agent of %s is gone, its workers have ended, %s", case.node, why)
        else:
            logger.info("the agent of %s is gone; its workers have ended, and the other nodes know", case.node)


if __name__ == "__main__":
    main()
