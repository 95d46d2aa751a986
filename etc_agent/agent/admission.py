"""Whether this `etc-run` may enter the run that it names: it may join a running job, and replaces a finished one.

The run id is the job's name, as under torchrun. Nodes of one job may have different arguments, interpreters, numbers of
slots and roles; only what would break the job if it differed is compared (`job_rules`).
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from etc_agent.agent.safety.survivors import Survivors
from etc_agent.agent.settings import JobSettings
from etc_agent.errors import EtcError
from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.fencing import Fencing
from etc_agent.reconfig.known.records import Ack, Current, Outcome
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import AmbiguousError
from etc_agent.rendezvous.etcd.values import Compare, Delete, DeletePrefix, KeyValue, Put
from etc_agent.rendezvous.keys import JobKeys

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.2


def admit(settings: JobSettings, client: EtcdClient, keys: JobKeys) -> str:
    """Enter the run: as its first agent, as a further agent of a running job, or in place of a job that is over.

    A run that has not ended and shows no node may be dead. It may also have just begun, or its agents may have lost
    etcd for longer than their leases. So its agents get time to appear, and it is replaced only when its workers are
    gone: at once where all of its nodes have testified so.

    Returns the job's incarnation, which distinguishes this run of the job from any later one.

    Raises:
        EtcError: the job that runs under this run id was started with other rules.
    """
    rules = job_rules(settings)
    with ExitStack() as stack:
        survivors: Survivors | None = None
        while True:
            entries, _ = client.get_prefix(keys.root)
            found = {entry.key: entry for entry in entries}
            job = found.get(keys.job)
            if job is not None and _is_alive(found, keys):
                running = job.json()
                _check_same(running, rules, settings.run_id)
                return str(running["incarnation"])
            if job is not None and not _has_ended(found, keys) and not _have_all_testified(found, keys):
                if survivors is None:
                    fencing = Fencing(settings.timeouts.lease_s)
                    survivors = stack.enter_context(Survivors(str(job.json()["incarnation"]), fencing))
                    wait_s = survivors.gone_in_s
                    logger.info("run id %r has a job without nodes; waiting %.0f s for them", keys.run_id, wait_s)
                survivors.ask(_acks(found, keys))
                if survivors.gone_in_s > 0:
                    time.sleep(_LOOK_AGAIN_S)
                    continue
            incarnation = uuid.uuid4().hex
            if _begin(client, keys, found, {**rules, "incarnation": incarnation, "started": time.time()}):
                return incarnation


def _acks(found: dict[str, KeyValue], keys: JobKeys) -> list[Ack]:
    return [Ack.from_json(entry.json()) for key, entry in found.items() if key.startswith(keys.acks_prefix)]


def _have_all_testified(found: dict[str, KeyValue], keys: JobKeys) -> bool:
    """Whether the workers of every node that was ever given any have ended: there is a `Testimony` that is newer than
    all else that is known of the node."""
    known: dict[str, int] = {}
    for key, entry in found.items():
        nodes: Iterable[str] = ()
        if key.startswith(keys.generations_prefix):
            nodes = Generation.from_json(entry.json()).nodes
        elif key.startswith(keys.acks_prefix):
            nodes = (Ack.from_json(entry.json()).node,)
        for node in nodes:
            known[node] = max(entry.mod_revision, known.get(node, 0))
    gone = {node: found.get(keys.gone(node)) for node in known}
    return bool(known) and all(said is not None and said.mod_revision > known[node] for node, said in gone.items())


def job_rules(settings: JobSettings) -> dict[str, Any]:
    """What must be equal on every node, by the name under which the user gives it.

    Any node may become the leader, so the rules of its decisions belong to the job. The lease is one of them: the
    leader gives a lost node's work to others when, by the node's own lease, it must have stopped its workers.
    """
    model = settings.model
    return {
        "nnodes": f"{settings.min_nodes}:{settings.max_nodes}",
        "parallel": str(settings.parallel) if settings.parallel else None,
        "allowed": [str(config) for config in settings.allowed] if settings.allowed is not None else None,
        "global_batch": settings.global_batch,
        "model": {"layers": model.layers, "heads": model.heads, "hidden": model.hidden},
        "max_restarts": settings.max_restarts,
        "redundancy": str(settings.redundancy),
        "checkpoint": settings.checkpoint.variables() if settings.checkpoint else None,
        "lease_s": settings.timeouts.lease_s,
    }


def _is_alive(found: dict[str, KeyValue], keys: JobKeys) -> bool:
    return not _has_ended(found, keys) and any(key.startswith(keys.nodes_prefix) for key in found)


def _has_ended(found: dict[str, KeyValue], keys: JobKeys) -> bool:
    current = found.get(keys.current)
    return current is not None and Current.from_json(current.json()).outcome is not Outcome.RUNNING


def _check_same(running: dict[str, Any], rules: dict[str, Any], run_id: str) -> None:
    for name, value in rules.items():
        if running.get(name) != value:
            raise EtcError(
                f"run id {run_id!r} is a job whose {name} is {_shown(running.get(name))}, and this node was given "
                f"{_shown(value)}; give the same on every node, or another --rdzv-id if this is another job"
            )


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _begin(client: EtcdClient, keys: JobKeys, found: dict[str, KeyValue], record: dict[str, Any]) -> bool:
    """Write the job's first record, once; returns whether this agent wrote it. The same transaction removes the records
    of a dead run."""
    job = found.get(keys.job)
    conditions = [Compare.mod_revision(keys.job, job.mod_revision if job else 0)]
    if not _has_ended(found, keys):
        conditions.append(Compare.none_under(keys.nodes_prefix))
    stale = [
        keys.nodes_prefix, keys.gone_prefix, keys.generations_prefix, keys.acks_prefix, keys.history_prefix,
        keys.drains_prefix,
    ]
    ops = [DeletePrefix(prefix) for prefix in stale] if job else []
    of_one_run = (
        keys.current, keys.status, keys.leader, keys.reply, keys.scale, keys.pause, keys.stop, keys.preview,
        keys.preview_reply,
    )
    gone = of_one_run if job else ()
    try:
        put = Put(keys.job, json.dumps(record))
        result = client.transact(conditions, [*ops, *(Delete(key) for key in gone), put])
    except AmbiguousError:
        return False
    if result.succeeded and job:
        logger.info("run id %r was used before by a job that is over; its records are replaced", keys.run_id)
    return result.succeeded
