"""The settings of torchrun's etcd-v3 rendezvous, from `--nnodes`, `--rdzv-endpoint` and `--rdzv-conf`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etc_agent.rendezvous.etcd.client import EtcdClient, Tls
from etc_agent.rendezvous.etcd.errors import EtcdError

log = logging.getLogger(__name__)

PASSWORD_VARIABLE = "ETC_PASSWORD"

_KNOWN = {
    "timeout": "join_timeout under the name that torchrun itself sets",
    "join_timeout": "seconds to wait for enough nodes; 600",
    "last_call_timeout": "seconds without a further newcomer after which newcomers are let in; 2",
    "lease_ttl": "seconds after which a silent node counts as lost; 10",
    "read_timeout": "seconds to wait for etcd; 5",
    "node_rank": "the rank this node wants",
    "rank": "the same",
    "prefix": "of the keys in etcd; /etc-run",
    "protocol": "http or https",
    "ca_cert": "PEM file of the authority to trust",
    "ssl_cert": "PEM file of our own certificate",
    "ssl_cert_key": "PEM file of its key",
    "user": "of etcd",
    "password_file": f"with the user's password; else it is taken from {PASSWORD_VARIABLE}",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The limits and timeouts of one run, as this node's user gave them."""

    min_nodes: int
    max_nodes: int
    join_timeout_s: int
    settle_s: int
    lease_ttl_s: int
    node_rank: int | None

    @staticmethod
    def from_config(min_nodes: int, max_nodes: int, config: Mapping[str, Any]) -> Settings:
        """From `--nnodes` and `--rdzv-conf`.

        Raises:
            EtcdError: a value is not a number in its range.
        """
        unknown = sorted(set(config) - set(_KNOWN))
        if unknown:  # torchrun ignores options that a backend does not know, and scripts rely on that
            log.warning("--rdzv-conf %s is ignored; etcd-v3 takes %s", ", ".join(unknown), ", ".join(_KNOWN))
        node_rank = config.get("node_rank", config.get("rank"))
        return Settings(
            min_nodes,
            max_nodes,
            _whole(config, "join_timeout", _whole(config, "timeout", 600, 1), 1),
            _whole(config, "last_call_timeout", 2, 0),
            _whole(config, "lease_ttl", 10, 1),
            None if node_rank is None else _whole({"node_rank": node_rank}, "node_rank", 0, 0),
        )


def client_from_config(endpoint: str, config: Mapping[str, Any]) -> EtcdClient:
    """The client for `--rdzv-endpoint` (several are separated by commas) and `--rdzv-conf`.

    Raises:
        EtcdError: one of them is wrong, or a file cannot be read.
    """
    user = config.get("user")
    return EtcdClient(
        [part for part in endpoint.split(",") if part.strip()],
        tls=_tls(config),
        user=user,
        password=None if user is None else _password(config),
        timeout_s=_whole(config, "read_timeout", 5, 1),
    )


def _whole(config: Mapping[str, Any], key: str, default: int, least: int) -> int:
    value = config.get(key, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = least - 1
    if number < least:
        raise EtcdError(f"{key}={value} was given in --rdzv-conf; it must be a whole number of at least {least}")
    return number


def _tls(config: Mapping[str, Any]) -> Tls | None:
    protocol = config.get("protocol", "http")
    if protocol not in ("http", "https"):
        raise EtcdError(f"protocol={protocol} was given in --rdzv-conf; it must be http or https")
    files = [config.get(key) for key in ("ca_cert", "ssl_cert", "ssl_cert_key")]
    if protocol == "http" and not any(files):
        return None
    return Tls(*(Path(file) if file else None for file in files))


def _password(config: Mapping[str, Any]) -> str:
    file = config.get("password_file")
    if file is None:
        password = os.environ.pop(PASSWORD_VARIABLE, None)  # the workers inherit torchrun's environment
        if password is None:
            raise EtcdError(f"an etcd user was given without a password; set {PASSWORD_VARIABLE} or password_file=PATH")
        return password
    try:
        return Path(file).read_text().rstrip("\n")
    except OSError as error:
        raise EtcdError(f"cannot read the etcd password file {file}: {error.strerror}") from None
