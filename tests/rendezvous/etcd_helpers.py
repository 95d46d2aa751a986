"""What several test files of this room need."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from etc_agent.rendezvous.etcd.transport import Tls
from etc_agent.rendezvous.private.listen import free_port
from etc_agent.rendezvous.private.server import EtcdServer


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> float:
    """Wait until `condition` is true; the seconds that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, f"not true after {timeout_s} s"
        time.sleep(0.005)
    return time.monotonic() - begin


def freeze(pid: int) -> None:
    """SIGSTOP, in effect when this returns: the signal alone leaves threads running for a moment."""
    os.kill(pid, signal.SIGSTOP)
    stats = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    wait_until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats))


class Wire:
    """A cable between a client and etcd that can be cut, or made to lose what goes one way. A TCP proxy on loopback."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.loses_requests = False
        self.loses_answers = False
        self.delay_s = 0.0
        self._is_cut = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._is_cut = True
        self._reset()

    def mend(self) -> None:
        """Carry everything again. Connections that lost something are reset: half a stream is no stream."""
        had_lost = self.loses_requests or self.loses_answers
        self._is_cut = self.loses_requests = self.loses_answers = False
        if had_lost:
            self._reset()

    def lead_to(self, target: str) -> None:
        """Connect to another etcd from now on."""
        self.target = target
        self._reset()

    def _reset(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                if self._is_cut:
                    near.close()
                    continue
                host, port = self.target.split(":")
                far = socket.create_connection((host, int(port)))
            except OSError:
                if self._listener.fileno() < 0:
                    return
                near.close()
                continue
            with self._lock:
                self._sockets |= {near, far}
            for source, sink, is_answer in ((near, far, False), (far, near, True)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._carry, args=(source, sink, is_answer), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.delay_s)
                if not (self.loses_answers if is_answer else self.loses_requests):
                    sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def etcd_cluster(num_members: int) -> Iterator[list[EtcdServer]]:
    ports = [free_port() for _ in range(num_members)]
    spec = ",".join(f"m{index}=http://127.0.0.1:{port}" for index, port in enumerate(ports))
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                EtcdServer(name=f"m{index}", peer_port=port, initial_cluster=spec, is_waiting=False)
            )
            for index, port in enumerate(ports)
        ]
        for server in servers:
            server.wait_ready()
        yield servers


def make_certificates(folder: Path) -> tuple[Tls, Tls]:
    """A CA of our own and what etcd and a client show each other: (etcd's, the client's)."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        *("req", "-x509", *key, "-days", "2", "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    for name in ("server", "client"):
        (folder / f"{name}.ext").write_text(
            "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        openssl("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
    ca = folder / "ca.pem"
    return tuple(Tls(ca, folder / f"{name}.pem", folder / f"{name}.key") for name in ("server", "client"))  # type: ignore[return-value]


def run_etcdctl(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "ETCDCTL_API": "3"})
