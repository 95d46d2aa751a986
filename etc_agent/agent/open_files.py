"""How many files this agent may have open: each worker, connection and etcd itself need some."""

from __future__ import annotations

import resource

from etc_agent.errors import EtcError

_OF_AGENT = 192
"""The agent's own and those of a private etcd, which wants 150 beside its connections."""
_OF_WORKER = 16
_MOST = 65536
"""More helps nobody, and programs that close all possible files when they start take long where there are a billion."""


def allow_open_files(num_slots: int) -> None:
    """Raise the limit of this process and its children as far as the user may; Python and Go programs rely on that.

    Raises:
        EtcError: that is too few for `num_slots` workers.
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
