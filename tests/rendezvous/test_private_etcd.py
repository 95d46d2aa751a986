"""The private etcd of one user: who reaches it, and what is said when it cannot start."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etc_agent.places import socket_folder
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.private.etcd_log import cause
from etc_agent.rendezvous.private.listen import OnSocket
from etc_agent.rendezvous.private.server import EtcdServer
from tests.users import as_root, error_of_another_user


@pytest.fixture
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    folder = socket_folder("etc-run-test-")
    with EtcdServer(listen=OnSocket(folder)) as server:
        yield server
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


def listening_ports(pid: int) -> set[str]:
    """The addresses at which the process accepts TCP connections."""
    own = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists() or fd.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1])
    return found


def test_it_serves_a_client_and_etcdctl_at_its_socket_and_listens_nowhere_else(private: EtcdServer) -> None:
    with EtcdClient([private.endpoint]) as client:
        client.put("/x", "1")
        said = subprocess.run(
            ["etcdctl", f"--endpoints={private.endpoint}", "get", "--print-value-only", "/x"],
            capture_output=True, text=True, check=True, env={**os.environ, "ETCDCTL_API": "3"}, timeout=20,
        )
    assert said.stdout == "1\n"
    assert not listening_ports(private.pid)


def test_after_a_crash_it_answers_at_the_same_socket(private: EtcdServer) -> None:
    with EtcdClient([private.endpoint]) as client:
        client.put("/x", "1")
        private.kill()
        private.start_again()
        found = client.get("/x")
    assert found is not None
    assert found.text == "1"


@as_root
def test_another_user_does_not_reach_it(private: EtcdServer) -> None:
    path = private.endpoint.removeprefix("unix://")

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)

    connect()
    assert error_of_another_user(connect) == errno.EACCES
    assert error_of_another_user(lambda: os.listdir(private.folder)) == errno.EACCES


@as_root
@pytest.mark.parametrize("size", ["64k", "30m"])
def test_a_temporary_folder_without_room_is_named(tmp_path: Path, size: str) -> None:
    script = (
        "from etc_agent.rendezvous.etcd.errors import EtcdError\n"
        "from etc_agent.rendezvous.private.server import EtcdServer\n"
        "try: EtcdServer()\nexcept EtcdError as error: print(error)"
    )
    command = f"mount -t tmpfs -o size={size} none {tmp_path} && exec {sys.executable} -c '{script}'"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, env=environment, timeout=60
    )
    if "unshare" in ended.stderr or "mount" in ended.stderr:
        pytest.skip(f"no mounts of our own here: {ended.stderr.strip()}")
    (line,) = ended.stdout.splitlines()
    assert "does not start: failed to create WAL: no space left on device" in line
    assert f"make room in {tmp_path}" in line
    assert "set TMPDIR" in line


STACK = """goroutine 1 [running]:
go.uber.org/zap/zapcore.CheckWriteAction.OnWrite(0x1?, 0x40fd7f?, {0x0?, 0x0?, 0xc0001e8180?})
\tgo.uber.org/zap/zapcore/entry.go:198 +0x65
main.main()
\tgo.etcd.io/etcd/main.go:32 +0x17"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        pytest.param(
            '{"level":"warn","msg":"failed to preallocate","error":"no space left on device"}\n'
            '{"level":"panic","ts":"1","caller":"raft.go:5","msg":"failed to create WAL","error":"no space left on '
            'device","stacktrace":"go.etcd.io"}\npanic: failed to create WAL\n\n' + STACK,
            "failed to create WAL: no space left on device; make room in /t (etcd needs about 150 MB), "
            "or set TMPDIR to another folder",
            id="full",
        ),
        pytest.param(
            '{"level":"fatal","msg":"file descriptor limit of etcd process is too low; please set higher","limit":64}',
            "file descriptor limit of etcd process is too low; please set higher: limit 64; raise it with "
            "`ulimit -n 1024` or more",
            id="files",
        ),
        pytest.param(f"panic: something new\n\n{STACK}", "something new", id="panic"),
        pytest.param("exec format error", "exec format error", id="text"),
        pytest.param("", "its log is empty", id="empty"),
    ],
)
def test_the_cause_is_told_and_not_the_last_line_of_a_stack(log: str, expected: str) -> None:
    assert cause(log, Path("/t")) == expected


def test_a_start_that_fails_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(EtcdError, match="does not start"):
        EtcdServer(extra_args=["--no-such-flag"], listen=OnSocket(tmp_path))
    assert not list(tmp_path.iterdir())
