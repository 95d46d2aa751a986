"""The one place where settings become a connection to etcd."""

from __future__ import annotations

from etc_agent.agent.settings import EtcdSettings
from etc_agent.rendezvous.client import EtcdClient, Tls


def connect(etcd: EtcdSettings, timeout_s: float) -> EtcdClient:
    """A client for `etcd`. `timeout_s`: for each request, retries included."""
    files = (etcd.ca_file, etcd.cert_file, etcd.key_file)
    tls = Tls(*files) if any(files) else None
    return EtcdClient(etcd.endpoints, tls=tls, user=etcd.user, password=etcd.password, timeout_s=timeout_s)
