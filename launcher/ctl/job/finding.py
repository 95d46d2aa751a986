"""Which jobs there are under a prefix, asked for in few and small requests however much each job has stored."""

from __future__ import annotations

from collections.abc import Iterator

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdAuthError
from etc_agent.rendezvous.etcd.wire import range_end
from etc_agent.rendezvous.keys import JobKeys
from launcher.ctl.exits import CtlError, Exit

_AT_ONCE = 100
"""Keys in one answer: small jobs are found several at a time, and of a large one only the first keys are read."""


def run_ids(client: EtcdClient, prefix: str) -> Iterator[str]:
    """The run id of every job under `prefix`, in order."""
    root = prefix.rstrip("/") + "/"
    start, end = root, range_end(root.encode())
    while keys := client.keys_between(start, end, _AT_ONCE):
        found = list(dict.fromkeys(key.removeprefix(root).partition("/")[0] for key in keys))
        yield from found
        if len(keys) < _AT_ONCE:
            return
        start = range_end(f"{root}{found[-1]}/".encode()).decode()


def find_job(client: EtcdClient, prefix: str, run_id: str | None) -> JobKeys:
    """The keys of job `run_id`, or of the only job under `prefix` where None.

    Raises:
        CtlError: there is no such job, or several to choose from.
    """
    where = f"under {prefix} at {', '.join(client.endpoints)}"
    if run_id is not None:
        keys = JobKeys(run_id, prefix)
        if client.keys_between(keys.root, range_end(keys.root.encode()), 1):
            return keys
    try:
        known = list(run_ids(client, prefix))
    except EtcdAuthError as error:
        if run_id is None:
            raise CtlError(Exit.FAILED, f"--run-id: name the job; this user may not look for it: {error}") from None
        known = []
    there = f"jobs there: {', '.join(known)}" if known else "there are no jobs"
    if run_id is not None:
        raise CtlError(Exit.NOT_FOUND, f"no job {run_id} {where}; {there}")
    if not known:
        raise CtlError(Exit.NOT_FOUND, f"{there} {where}")
    if len(known) > 1:
        raise CtlError(Exit.MISTAKE, f"--run-id: which job {where}? {there}")
    return JobKeys(known[0], prefix)
