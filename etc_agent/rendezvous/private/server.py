"""A private etcd for one job on one machine.

Used by `--standalone`, tests and benchmarks. A guard process (`guard.py`) runs between this process and etcd, so that
etcd ends and its data are removed even if this process is killed, and so that etcd survives signals of others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from etc_agent.places import private_folder
from etc_agent.rendezvous.etcd.client import EtcdClient, Tls
from etc_agent.rendezvous.etcd.errors import EtcdAuthError, EtcdError, EtcdUnavailable
from etc_agent.rendezvous.private import guard
from etc_agent.rendezvous.private.binary import find_etcd
from etc_agent.rendezvous.private.etcd_log import cause
from etc_agent.rendezvous.private.listen import ON_LOOPBACK, Listen, OnPort, OnSocket

log = logging.getLogger(__name__)

_START_ATTEMPTS = 5


class _ExitedEarly(Exception):
    """etcd ended before it was ready; the argument is the end of its log."""


class _PortTaken(_ExitedEarly):
    """Another process took the port between the check and etcd's bind."""


class EtcdServer:
    """One private etcd member. Starts in the constructor, ready when that returns; stop it, or use `with`.

    binary: the server binary; None looks for one (find_etcd).
    listen: where clients reach it.
    name, peer_port, initial_cluster: for a member of a larger cluster, whose members must be started together
    (is_waiting false, then `wait_ready`). Otherwise it is a cluster of its own.
    extra_args: appended to etcd's command line.

    Raises:
        EtcdError: no binary, or etcd did not come up in start_timeout_s.
    """

    def __init__(
        self,
        binary: Path | str | None = None,
        *,
        start_timeout_s: float = 30.0,
        listen: Listen = ON_LOOPBACK,
        name: str | None = None,
        peer_port: int | None = None,
        initial_cluster: str | None = None,
        extra_args: Sequence[str] = (),
        is_waiting: bool = True,
    ) -> None:
        self._binary = Path(binary) if binary else find_etcd()
        self._listen = listen
        self._name = name or f"etcrun-{secrets.token_hex(4)}"
        self._peer_port, self._cluster = peer_port, initial_cluster
        self._extra_args = tuple(extra_args)
        self._token = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._folder = private_folder("etc-run-etcd-")
        self._urls = listen.pick(peer_port)
        try:
            self._start(start_timeout_s, is_waiting)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> EtcdServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """What clients use: ``host:port``, or ``unix:///path``. etcdctl accepts it too."""
        return self._urls.endpoint

    @property
    def pid(self) -> int:
        """etcd's own process id (not the guard's); it changes when the guard starts etcd again.

        Raises:
            EtcdError: it has been stopped.
        """
        with self._lock:
            if self._pid is None or self._guard is None or self._guard.stdout is None:
                raise EtcdError("this etcd has been stopped")
            started_since = (self._guard.stdout.read() or b"").split()
            self._pid = int(started_since[-1]) if started_since else self._pid
            return self._pid

    @property
    def folder(self) -> Path:
        """Where its data and its log (`etcd.log`) are."""
        return self._folder

    @property
    def is_running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def kill(self) -> None:
        """Kill it, as a crash would. The data stay for `start_again`. Idempotent."""
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
            except _ExitedEarly as exited:  # for example, another process has the port for the moment
                if time.monotonic() > deadline:
                    self.kill()
                    raise EtcdError(f"etcd did not start again at {self.endpoint}: {exited}") from None

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

    def _start(self, timeout_s: float, is_waiting: bool) -> None:
        deadline = time.monotonic() + timeout_s
        for attempt in range(_START_ATTEMPTS):
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
                log.debug("etcd start %d at %s failed: %s", attempt, self.endpoint, reason)
                self._urls = self._listen.pick(self._peer_port)
            except _ExitedEarly as exited:
                raise EtcdError(f"etcd ({self._binary}) does not start: {exited}") from None
        raise EtcdError(f"etcd ({self._binary}) does not start: {reason}")

    def _probe(self, deadline: float) -> None:
        """Wait until this etcd answers, and not another one that has taken its port."""
        with EtcdClient([self.endpoint], tls=self._client_tls(), timeout_s=1.0) as client:
            while self.is_running:
                try:
                    if self._name in client.member_names():
                        return
                    raise _PortTaken(f"another etcd answers at {self.endpoint}")
                except EtcdAuthError:
                    return  # it answers, and asks for credentials
                except EtcdUnavailable:
                    if time.monotonic() > deadline:
                        raise EtcdError(
                            f"etcd ({self._binary}) is not ready at {self.endpoint}: {self._why()}"
                        ) from None
        reason = self._why()
        raise (_PortTaken if "address already in use" in reason else _ExitedEarly)(reason)

    def _spawn(self) -> None:
        urls = self._urls
        command = [
            str(self._binary),
            f"--name={self._name}",
            f"--data-dir={self._folder / 'data'}",
            f"--listen-client-urls={urls.client}",
            f"--advertise-client-urls={urls.client}",
            f"--listen-peer-urls={urls.peer}",
            f"--initial-advertise-peer-urls={urls.peer}",
            f"--initial-cluster={self._cluster or f'{self._name}={urls.peer}'}",
            f"--initial-cluster-token={'etc-run' if self._cluster else self._token}",
            "--initial-cluster-state=new",
            # A job writes for as long as it runs, and old revisions are never read.
            "--auto-compaction-mode=revision",
            "--auto-compaction-retention=10000",
            "--logger=zap",
            "--log-level=warn",
        ]
        if tls := self._tls:
            command += [f"--cert-file={tls.certificate}", f"--key-file={tls.key}"]
            if tls.ca:
                command += ["--client-cert-auth", f"--trusted-ca-file={tls.ca}"]
        # etcd would read ETCD_* variables of the user's shell (meant for etcdctl, say) as server flags.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("ETCD_", "ETCDCTL_"))}
        folder = self._listen.folder if isinstance(self._listen, OnSocket) else self._folder
        with (self._folder / "etcd.log").open("ab") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-S", "-E", guard.__file__, str(self._folder), *command, *self._extra_args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
                cwd=folder,
            )
        self._pid = self._read_pid(self._guard)

    def _read_pid(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise EtcdError(f"cannot start etcd ({self._binary}): {self._why()}")
        os.set_blocking(process.stdout.fileno(), False)
        return int(line)

    def _end(self, grace_s: float) -> None:
        with self._lock:
            process, self._guard, self._pid = self._guard, None, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        if grace_s > 0:
            _order(process, b"stop\n")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        _order(process, b"kill\n")
        process.wait()
        process.stdin.close()
        process.stdout.close()

    @property
    def _tls(self) -> Tls | None:
        return self._listen.tls if isinstance(self._listen, OnPort) else None

    def _client_tls(self) -> Tls | None:
        """TLS for the probe: it trusts etcd's own certificate, and presents the same where one is required."""
        tls = self._tls
        return None if tls is None else Tls(tls.ca or tls.certificate, tls.certificate, tls.key)

    def _why(self) -> str:
        """The cause of its end, from its log."""
        try:
            log = (self._folder / "etcd.log").read_text(errors="replace")
        except OSError:
            log = ""
        return cause(log, self._folder.parent)


def _order(guard: subprocess.Popen[bytes], line: bytes) -> None:
    assert guard.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the guard has ended, and etcd before it
        os.write(guard.stdin.fileno(), line)
