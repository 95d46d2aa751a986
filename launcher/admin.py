"""What an administrator does with a running job: writing keys, and waiting for answers.

Everything here can be done with ``etcdctl put`` as well; this adds a check of the value before it is written, and the
reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from etc_agent.errors import EtcError
from etc_agent.reconfig.records import Current, Outcome, Reply, Result
from etc_agent.reconfig.wanted import parse_wanted
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.mirror import Mirror, Snapshot


def find_job(client: EtcdClient, prefix: str, run_id: str | None) -> JobKeys:
    """The keys of job `run_id`, or of the only job under `prefix` where None.

    Raises:
        EtcError: there is no such job, or several to choose from.
    """
    if run_id is not None:
        keys = JobKeys(run_id, prefix)
        if client.get_prefix(keys.root)[0]:
            return keys
    entries, _ = client.get_prefix(prefix.rstrip("/") + "/")
    run_ids = sorted({entry.key.removeprefix(prefix.rstrip("/") + "/").split("/")[0] for entry in entries})
    known = f"jobs there: {', '.join(run_ids)}" if run_ids else "there are no jobs"
    if run_id is not None:
        raise EtcError(f"no job {run_id} under {prefix} at {', '.join(client.endpoints)}; {known}")
    if len(run_ids) != 1:
        raise EtcError(f"--run-id: which job under {prefix} at {', '.join(client.endpoints)}? {known}")
    return JobKeys(run_ids[0], prefix)


def current_of(snapshot: Snapshot, keys: JobKeys) -> Current:
    """The leader's `current` record; the defaults where the job has not started."""
    item = snapshot.get(keys.current)
    return Current.from_json(item.json()) if item else Current()


def reply_of(snapshot: Snapshot, keys: JobKeys) -> Reply | None:
    """The leader's last answer."""
    item = snapshot.get(keys.reply)
    if item is None:
        return None
    fields = item.json()
    return Reply.from_json({**fields, "result": Result(fields["result"])})


def is_paused(snapshot: Snapshot, keys: JobKeys) -> bool:
    """Whether an administrator has frozen reconfiguration."""
    item = snapshot.get(keys.pause)
    return item is not None and item.text.strip().lower() not in ("", "0", "false", "no")


def scale(
    client: EtcdClient, keys: JobKeys, value: str, *, wait: bool, timeout_s: float, on_reply: Callable[[Reply], None]
) -> Result | None:
    """Ask for another size, and wait for the leader's answer; with `wait` until no other follows.

    `value`: see `etc_agent.reconfig.wanted.parse_wanted`. `on_reply` is called with every answer to this request.
    Returns the last answer's result; None where the job is paused, so that the request waits unanswered.

    Raises:
        EtcError: the value is not a size (nothing is written), the job has ended, a newer request replaced this one, or
            no answer came in `timeout_s`.
    """
    try:
        parse_wanted(value)
    except ValueError as error:
        raise EtcError(str(error)) from None
    deadline = time.monotonic() + timeout_s
    mirror = Mirror(client, keys.root)
    try:
        _refuse_ended(mirror.snapshot(), keys)
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
                _refuse_ended(snapshot, keys)
                if current_of(snapshot, keys).handled_scale > revision:
                    raise EtcError(f"a newer request has taken the place of {value}; see etc-ctl status")
                return None
            last = reply
            on_reply(reply)
            if not wait or reply.result.is_final:
                return reply.result
    finally:
        mirror.close()
    if last is not None:
        raise EtcError(f"{value} is {last.result} but not done after {timeout_s:g} s (--timeout); it stays asked for")
    raise EtcError(f"no leader answered within {timeout_s:g} s (--timeout); the request stays written until one does")


def drain(
    client: EtcdClient, keys: JobKeys, node: str, *, deadline_s: float | None, wait: bool, timeout_s: float
) -> None:
    """Ask `node` to leave, and with `wait` wait until it has. `deadline_s`: it has so long to hand over its state.

    Raises:
        EtcError: there is no such node, or it is still there after `timeout_s`.
    """
    mirror = Mirror(client, keys.root)
    try:
        snapshot = mirror.snapshot()
        _refuse_ended(snapshot, keys)
        nodes = list(snapshot.under(keys.nodes_prefix))
        if node not in nodes:
            raise EtcError(f"no node {node} in job {keys.run_id}; there are {', '.join(nodes) or 'none'}")
        client.put(keys.drain(node), "" if deadline_s is None else f"{deadline_s:g}")
        if wait and not mirror.wait_for(lambda now: keys.node(node) not in now, timeout_s):
            raise EtcError(f"node {node} has not left after {timeout_s:g} s (--timeout); it stays asked to")
    finally:
        mirror.close()


def pause(client: EtcdClient, keys: JobKeys) -> None:
    """Freeze reconfiguration: training goes on, nothing changes size, requests wait.

    Raises:
        EtcError: the job has ended.
    """
    mirror = Mirror(client, keys.root)
    try:
        _refuse_ended(mirror.snapshot(), keys)
    finally:
        mirror.close()
    client.put(keys.pause, "true")


def resume(client: EtcdClient, keys: JobKeys) -> None:
    """End `pause`."""
    client.delete(keys.pause)


def _refuse_ended(snapshot: Snapshot, keys: JobKeys) -> None:
    current = current_of(snapshot, keys)
    if current.outcome is not Outcome.RUNNING:
        raise EtcError(f"job {keys.run_id} has {current.outcome}" + (f": {current.why}" if current.why else ""))
