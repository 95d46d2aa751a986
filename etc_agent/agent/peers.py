"""Who may use the control socket: processes of this user that this agent has started."""

from __future__ import annotations

import os
from pathlib import Path

from etc_agent.control.channel import Credentials


def objection(peer: Credentials) -> str | None:
    """Why this peer may not use it; None where it may."""
    if peer.uid != os.getuid():
        return f"it runs as user {peer.uid}, this job as user {os.getuid()}"
    if _is_descendant(peer.pid) or _is_descendant(_group_of(peer.pid)):
        return None
    return "it is no worker of this job, nor was it started by one"


def _is_descendant(pid: int) -> bool:
    """Whether `pid` descends from this process. A process whose parent has ended is recognised by its process group,
    whose leader is a worker."""
    agent = os.getpid()
    while pid > 1 and pid != agent:
        pid = _parent_of(pid)
    return pid == agent


def _parent_of(pid: int) -> int:
    """The parent's pid; 0 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid) if pid else 0
    except ProcessLookupError:
        return 0
