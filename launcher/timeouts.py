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
_MAY_BE_ZERO = ("settle_s", "hang_s")


def with_rdzv_conf(timeouts: Timeouts, conf: Mapping[str, Any]) -> Timeouts:
    """`timeouts` with those that `conf` gives, by our names or by torchrun's. Other keys mean nothing here.

    Raises:
        EtcError: a value is not a positive number of seconds, or a key looks like one of ours but is not.
    """
    known = {field.name for field in dataclasses.fields(Timeouts)}
    for key, value in conf.items():
        name = _RDZV_CONF_NAMES.get(key, key)
        if name not in known:
            # Keys of torchrun's own backends mean nothing here; ours all end in _s.
            if name.endswith("_s"):
                near = difflib.get_close_matches(name, known, n=1) or sorted(known)
                raise EtcError(f"--rdzv-conf: unknown timeout {key}; did you mean {', '.join(near)}?")
            continue
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        if not 0 <= seconds < math.inf or (seconds == 0 and name not in _MAY_BE_ZERO):
            raise EtcError(f"--rdzv-conf: {key}: expected a positive number of seconds, got {value!r}")
        timeouts = dataclasses.replace(timeouts, **{name: seconds})
    return timeouts
