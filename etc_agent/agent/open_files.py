"""The limit on open files of this agent: each worker, each connection and a private etcd need some."""

from __future__ import annotations

import resource

from etc_agent.errors import EtcError

_OF_AGENT = 192
"""Open files of the agent itself and of a private etcd, which uses 150 beside its connections."""
_OF_WORKER = 16
_MOST = 65536
"""Upper bound: nothing needs more, and programs that close every possible descriptor at start become slow."""


def allow_open_files(num_slots: int) -> None:
    """Raise the limit of this process and its children as far as the user may.

    Raises:
        EtcError: even that is too low for `num_slots` workers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    needed = _OF_AGENT + _OF_WORKER * num_slots
    if wanted < needed:
        raise EtcError(
            f"this shell allows {wanted} open files, and {num_slots} workers need {needed}; raise the hard limit with "
            f"`ulimit -H -n {needed}` as root, or LimitNOFILE= of the service"
        )
