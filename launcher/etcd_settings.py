"""Where etcd is, and the credentials for it, merged from the command line, the environment and the job file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from etc_agent.agent.settings import EtcdSettings
from etc_agent.errors import EtcError
from launcher.etcd_options import check_readable, parse_endpoints, read_password
from launcher.given import Given
from launcher.options import ELASTIC_BACKEND

T = TypeVar("T", str, Path)

# --rdzv-conf of torchrun with --rdzv-backend=etcd-v3 -> our option.
_RDZV_CONF_NAMES = {
    "prefix": "etcd_prefix",
    "user": "etcd_user",
    "password_file": "etcd_password_file",
    "ca_cert": "etcd_ca_file",
    "ssl_cert": "etcd_cert_file",
    "ssl_cert_key": "etcd_key_file",
}


def etcd_settings(given: Given, standalone: bool) -> EtcdSettings:
    """Where etcd is: ``--etcd-*`` and their variables over ``--rdzv-endpoint`` and ``--rdzv-conf`` over the file.

    If `standalone` there is none yet, and only the prefix counts.

    Raises:
        EtcError: something is missing or wrong; one line that names its source.
    """
    section = given.job.rendezvous
    prefix, _ = _chosen(given, "etcd_prefix", section.prefix, "rendezvous.prefix")
    prefix = prefix or EtcdSettings().prefix
    if standalone:
        _refuse_credentials(given)
        return EtcdSettings(prefix=prefix)
    endpoints = _endpoints(given)
    ca_file, cert_file, key_file = (
        _pem(given, name, getattr(section.tls, name)) for name in ("ca_file", "cert_file", "key_file")
    )
    if (cert_file is None) != (key_file is None):
        raise EtcError("--etcd-cert-file and --etcd-key-file go together; give both or neither")
    user, _ = _chosen(given, "etcd_user", section.user, "rendezvous.user")
    password = _password(given)
    if user is not None and password is None:
        raise EtcError(f"etcd: user {user} without a password; set ETC_PASSWORD or give --etcd-password-file FILE")
    if user is None and password is not None:
        raise EtcError("etcd: a password without a user; add --etcd-user NAME")
    return EtcdSettings(endpoints, prefix, ca_file, cert_file, key_file, user, password)


def _refuse_credentials(given: Given) -> None:
    """Refuse what was typed for an etcd that is not used. What the environment or the job file says may be meant for
    other jobs."""
    names = ("etcd_user", "etcd_password_file", "etcd_ca_file", "etcd_cert_file", "etcd_key_file")
    if taken := next(filter(None, map(given.line.typed.get, names)), None):
        raise EtcError(
            f"{taken}: --standalone starts an etcd of its own, which only this user reaches; leave {taken} out, or "
            "give --etcd-endpoints HOST:PORT instead"
        )


def _endpoints(given: Given) -> tuple[str, ...]:
    is_ours = given.line.args.rdzv_backend == ELASTIC_BACKEND
    names = ["etcd_endpoints", "rdzv_endpoint"] if is_ours else ["etcd_endpoints"]
    names.sort(key=lambda name: name not in given.line.typed)
    if (name := next(filter(given.line.given, names), None)) is not None:
        endpoints = parse_endpoints([given.option(name)], given.source(name, ""))
    elif given.job.rendezvous.endpoints:
        endpoints = parse_endpoints(given.job.rendezvous.endpoints, f"{given.file}: rendezvous.endpoints")
    else:
        raise EtcError("no etcd server given; add --etcd-endpoints HOST:PORT, or --standalone for a private one")
    if is_ours and given.rdzv_conf.get("protocol") == "https":
        return tuple(f"https://{endpoint.removeprefix('https://')}" for endpoint in endpoints)
    return endpoints


def _chosen(given: Given, name: str, from_file: T | None, field: str) -> tuple[str | T | None, str]:
    """The value of our option `name`, and where it came from."""
    if (value := given.option(name)) is not None:
        return value, given.source(name, field)
    if given.line.args.rdzv_backend == ELASTIC_BACKEND:
        for key, value in given.rdzv_conf.items():
            if _RDZV_CONF_NAMES.get(key) == name:
                return value, f"--rdzv-conf: {key}"
    return from_file, given.source(name, field)


def _pem(given: Given, name: str, from_file: Path | None) -> Path | None:
    path, source = _chosen(given, f"etcd_{name}", from_file, f"rendezvous.tls.{name}")
    return None if path is None else check_readable(Path(path), source)


def _password(given: Given) -> str | None:
    name = "etcd_password_file"
    from_environment = os.environ.get("ETC_PASSWORD")
    if from_environment and name not in given.line.typed:
        return from_environment
    path, source = _chosen(given, name, given.job.rendezvous.password_file, "rendezvous.password_file")
    return None if path is None else read_password(Path(path), source)
