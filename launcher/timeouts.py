"""Timeouts out of ``--rdzv-conf``."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from etc_agent.agent.settings import Timeouts
from etc_agent.errors import EtcError

# torchrun's names for what its users already put into --rdzv-conf.
_RDZV_CONF_NAMES = {
    "timeout": "join_s",
    "join_timeout": "join_s",
    "last_call_timeout": "settle_s",
    "lease_ttl": "lease_s",
    "read_timeout": "etcd_s",
}
# What says where etcd is and who we are (`launcher.etcd_settings`, `launcher.merge`), and what only torchrun's own
# backends know: a command line that was written for them goes on to work.
_ELSEWHERE = frozenset({
    "prefix", "user", "password_file", "protocol", "ca_cert", "ssl_cert", "ssl_cert_key", "node_rank", "rank", "cert",
    "key", "cacert", "etcd_prefix", "is_host", "store_type", "close_timeout", "heartbeat_timeout",
    "keep_alive_interval", "keep_alive_max_attempt",
})
_MAY_BE_ZERO = ("settle_s", "hang_s")


def with_rdzv_conf(timeouts: Timeouts, conf: Mapping[str, Any]) -> Timeouts:
    """`timeouts` with those that `conf` gives, by our names or by torchrun's. Where two keys name one timeout, ours
    counts before torchrun's, and ``timeout`` last: torch's `LaunchConfig` adds it to what the user gave.

    Raises:
        EtcError: a value is not a positive number of seconds, or neither we nor torchrun's backends know a key.
    """
    known = {field.name for field in dataclasses.fields(Timeouts)}
    for key, value in sorted(conf.items(), key=lambda item: _rank(item[0])):
        name = _RDZV_CONF_NAMES.get(key, key)
        if name in _ELSEWHERE:
            continue
        if name not in known:
            names = sorted({*known, *_RDZV_CONF_NAMES, *_ELSEWHERE})
            near = difflib.get_close_matches(key, names, n=1)
            said = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise EtcError(f"--rdzv-conf: unknown key {key}; {said}")
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        if not 0 <= seconds < math.inf or (seconds == 0 and name not in _MAY_BE_ZERO):
            raise EtcError(f"--rdzv-conf: {key}: expected a positive number of seconds, got {value!r}")
        timeouts = dataclasses.replace(timeouts, **{name: seconds})
    return timeouts


def _rank(key: str) -> int:
    """Later ones count."""
    return 0 if key == "timeout" else 1 if key in _RDZV_CONF_NAMES else 2
