"""What an administrator does with a running job: writing keys, and waiting for answers.

Everything here can be done with ``etcdctl put`` as well; this adds a check of what is written, and the reply.
"""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from etc_agent.reconfig.known.records import Outcome, Reply, Result
from etc_agent.reconfig.sizes.controls import Order
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.values import Get, GetPrefix, KeyValue
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.mirror import Mirror, Snapshot
from launcher.ctl.exits import CtlError, Exit
from launcher.ctl.job.jobs import Job, current_of, job_of, reply_of

if TYPE_CHECKING:
    from etc_agent.reconfig.sizes.preview import Preview


def order(why: str) -> Order:
    """An order by whoever runs this, now."""
    try:
        by = getpass.getuser()
    except (KeyError, OSError):  # a user that the system has no name for
        by = ""
    return Order(why, by, round(time.time(), 3))


@contextmanager
def following(client: EtcdClient, keys: JobKeys) -> Iterator[Mirror]:
    """A mirror of the job's keys, closed in the end."""
    mirror = Mirror(client, keys.root)
    try:
        yield mirror
    finally:
        mirror.close()


def scale(
    client: EtcdClient, keys: JobKeys, value: str, *, wait: bool, timeout_s: float, on_reply: Callable[[Reply], None]
) -> Result | None:
    """Ask for another size, and wait for the leader's answer; with `wait` until no other follows.

    `value`: see `sizes.wanted.parse_wanted`, already checked. `on_reply` is called with every answer to
    this request. Returns the last answer's result; None where the job is paused, so that the request waits unanswered.

    Raises:
        CtlError: the job has ended, a newer request replaced this one, or no answer came in `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with following(client, keys) as mirror:
        refuse_ended(mirror.snapshot(), keys)
        revision = client.put(keys.scale, value)
        last: Reply | None = None

        def answer(now: Snapshot) -> Reply | None:
            reply = reply_of(now, keys)
            return reply if reply is not None and reply.revision == revision else None

        def has_news(now: Snapshot) -> bool:
            current = current_of(now, keys)
            is_over = current.handled_scale > revision or current.outcome is not Outcome.RUNNING
            return answer(now) not in (None, last) or is_over or (last is None and is_paused(now, keys))

        while mirror.wait_for(has_news, deadline - time.monotonic()):
            snapshot = mirror.snapshot()
            reply = answer(snapshot)
            if reply is None or reply == last:
                refuse_ended(snapshot, keys)
                if current_of(snapshot, keys).handled_scale > revision:
                    told = f"a newer request has taken the place of {value}; see etc-ctl status"
                    raise CtlError(Exit.FAILED, told)
                return None
            last = reply
            on_reply(reply)
            if not wait or reply.result.is_final:
                return reply.result
    waited = f"{timeout_s:g} s (--timeout)"
    if last is not None:
        raise CtlError(Exit.NO_ANSWER, f"{value} is {last.result} but not done after {waited}; it stays asked for")
    raise CtlError(Exit.NO_ANSWER, f"no leader answered within {waited}; the request stays written until one does")


def preview(client: EtcdClient, keys: JobKeys, value: str, timeout_s: float) -> Preview:
    """Ask the leader what `scale` would do, without doing it.

    Raises:
        CtlError: the job has ended, or no answer came in `timeout_s`.
    """
    from etc_agent.reconfig.sizes.preview import Preview  # loads the planner, which no other command needs

    with following(client, keys) as mirror:
        refuse_ended(mirror.snapshot(), keys)
        revision = client.put(keys.preview, value)

        def answer(now: Snapshot) -> dict[str, Any] | None:
            item = now.get(keys.preview_reply)
            fields = item.json() if item is not None else {}
            return fields if fields.get("revision") == revision else None

        try:
            mirror.wait_for(lambda now: answer(now) is not None, timeout_s)
            fields = answer(mirror.snapshot())
        finally:
            client.delete(keys.preview)
    if fields is None:
        told = f"no leader answered within {timeout_s:g} s (--timeout); etc-ctl explain tells what it waits for"
        raise CtlError(Exit.NO_ANSWER, told)
    return Preview.from_json(fields)


def drain(
    client: EtcdClient, keys: JobKeys, node: str, *, deadline_s: float | None, wait: bool, timeout_s: float
) -> None:
    """Ask `node` to leave, and with `wait` wait until it has. `deadline_s`: it has so long to hand over its state.

    Raises:
        CtlError: there is no such node, or it is still there after `timeout_s`.
    """
    with following(client, keys) as mirror:
        snapshot = mirror.snapshot()
        refuse_ended(snapshot, keys)
        nodes = list(snapshot.under(keys.nodes_prefix))
        if node not in nodes:
            there = ", ".join(nodes) or "none"
            raise CtlError(Exit.NOT_FOUND, f"no node {node} in job {keys.run_id}; there are {there}")
        client.put(keys.drain(node), "" if deadline_s is None else f"{deadline_s:g}")
        if wait and not mirror.wait_for(lambda now: keys.node(node) not in now, timeout_s):
            raise CtlError(
                Exit.NO_ANSWER, f"node {node} has not left after {timeout_s:g} s (--timeout); it stays asked to"
            )


def pause(client: EtcdClient, keys: JobKeys, why: str) -> None:
    """Freeze reconfiguration: training goes on, nothing changes size, requests wait.

    Raises:
        CtlError: the job has ended.
    """
    refuse_ended(_read(client, [Get(keys.current)]), keys)
    if why or client.get(keys.pause) is None:  # without a reason, the one of a pause that is there stays
        client.put(keys.pause, json.dumps(order(why).to_json()))


def resume(client: EtcdClient, keys: JobKeys) -> bool:
    """End `pause`; whether there was one."""
    was_there = client.get(keys.pause) is not None
    if was_there:
        client.delete(keys.pause)
    return was_there


def cordon(client: EtcdClient, keys: JobKeys, node: str, index: int | None, why: str) -> bool:
    """Mark a node, or one slot of it, so that no worker is placed there. Whether such a node is in the job now: one
    that comes later is cordoned as well.

    Raises:
        CtlError: the node is there and has no such slot.
    """
    key = keys.cordon(node, index)
    there = _read(client, [Get(keys.node(node))])
    record = there[keys.node(node)].json() if there else None
    if record is not None and index is not None and index >= record["num_slots"]:
        slots = f"it has {record['num_slots']}, from 0 on"
        raise CtlError(Exit.NOT_FOUND, f"node {node} has no slot {index}; {slots}")
    client.put(key, json.dumps(order(why).to_json()))
    return record is not None


def uncordon(client: EtcdClient, keys: JobKeys, node: str, index: int | None) -> None:
    """Remove the mark.

    Raises:
        CtlError: there is none.
    """
    key = keys.cordon(node, index)
    if client.get(key) is None:
        cordons = _read(client, [GetPrefix(keys.cordons_prefix)])
        known = ", ".join(name.removeprefix(keys.cordons_prefix) for name in cordons) or "nothing"
        what = key.removeprefix(keys.cordons_prefix)
        raise CtlError(Exit.NOT_FOUND, f"{what} is not cordoned; cordoned is {known}")
    client.delete(key)


def stop(client: EtcdClient, keys: JobKeys, why: str, *, wait: bool, timeout_s: float) -> Job | None:
    """Tell the job to end; with `wait` wait until it has, and return it.

    Raises:
        CtlError: it has ended already, or not after `timeout_s`.
    """
    with following(client, keys) as mirror:
        refuse_ended(mirror.snapshot(), keys)
        client.put(keys.stop, json.dumps(order(why).to_json()))
        if not wait:
            return None

        def has_ended(now: Snapshot) -> bool:
            return current_of(now, keys).outcome is not Outcome.RUNNING

        if not mirror.wait_for(has_ended, timeout_s):
            told = f"job {keys.run_id} has not ended after {timeout_s:g} s (--timeout); it stays told to"
            raise CtlError(Exit.NO_ANSWER, told)
        return job_of(mirror.snapshot(), keys)


def is_paused(snapshot: Snapshot, keys: JobKeys) -> bool:
    """Whether an administrator has frozen reconfiguration."""
    return job_of({key: snapshot[key] for key in (keys.pause,) if key in snapshot}, keys).pause is not None


def refuse_ended(entries: Snapshot | dict[str, KeyValue], keys: JobKeys) -> None:
    """Raises CtlError where the job has ended."""
    current = current_of(entries, keys)
    if current.outcome is not Outcome.RUNNING:
        because = f": {current.why}" if current.why else ""
        raise CtlError(Exit.JOB_ENDED, f"job {keys.run_id} has {current.outcome}{because}")


def _read(client: EtcdClient, reads: Sequence[Get | GetPrefix]) -> dict[str, KeyValue]:
    return {kv.key: kv for read in client.read(reads).reads for kv in read}
