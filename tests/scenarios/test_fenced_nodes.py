"""No node trains on while the others go on without it: neither one that is cut off, nor one whose agent is stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from network import Host, Network
from running import Etcd, EtcRun, marked, wait_until

from etc_agent.rendezvous.private.listen import OnPort
from etc_agent.rendezvous.private.server import EtcdServer

Cleanup = Callable[[EtcRun], EtcRun]
LEASE_S = 4
SCRIPT = """
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[1]) / f"{os.environ['ETC_GENERATION']}-{os.environ['RANK']}-{os.getpid()}"
while True:
    out.write_text(str(time.time()))
    time.sleep(0.05)
"""
"""It has no session and needs nobody, so nothing but its agent can stop it. Its file says how long it lived."""


def node(tmp_path: Path, server: EtcdServer, address: str, prefix: tuple[str, ...] = ()) -> EtcRun:
    script = tmp_path / "endless.py"
    script.write_text(SCRIPT)
    return EtcRun(
        "--nnodes", "1:2", "--nproc-per-node", 1, "--rdzv-id", "job", "--rdzv-conf", f"lease_s={LEASE_S},start_s=1",
        "--etcd-endpoints", server.endpoint, "--local-addr", address, script, tmp_path, cwd=tmp_path, prefix=prefix,
    )


def lives(tmp_path: Path) -> dict[int, set[Path]]:
    """Generation -> the files of its workers."""
    found: dict[int, set[Path]] = {}
    for path in tmp_path.glob("*-*-*"):
        found.setdefault(int(path.name.split("-")[0]), set()).add(path)
    return found


def wait_for_workers(tmp_path: Path, number: int, after: int = 0) -> int:
    """The newest generation, once it is past `after` and `number` workers of it live."""
    def newest() -> int | None:
        generation, files = max(lives(tmp_path).items(), default=(0, set()))
        return generation if generation > after and len(files) == number else None

    return wait_until(newest, f"{number} workers in a generation after {after}")


def test_a_node_that_is_cut_off_stops_its_workers_before_the_others_go_on_and_joins_again(
    tmp_path: Path, cleanup: Cleanup, make_network: Callable[[int], Network]
) -> None:
    network = make_network(2)
    with EtcdServer(listen=OnPort(network.gateway)) as server:
        runs = {host: cleanup(node(tmp_path, server, host.address, host.prefix)) for host in network.hosts}
        both = wait_for_workers(tmp_path, 2)
        pids = lives(tmp_path)[both]

        server.kill()  # etcd alone is away, for longer than a lease: the nodes reach each other
        time.sleep(1.5 * LEASE_S)
        server.start_again()
        etcd = Etcd(server.endpoint, "job")
        wait_until(lambda: len(node_names(etcd)) == 2, "both nodes in etcd")

        cut = network.hosts[0]
        network.cut(cut)
        alone = wait_for_workers(tmp_path, 1, after=both)
        assert "was lost" in Etcd(server.endpoint, "job").get(f"generations/{alone}")["reason"]
        assert lives(tmp_path)[both] == pids, "nothing was restarted while etcd alone was away"
        ended = {path: path.read_text() for path in pids}
        assert not workers_of(runs[cut])
        runs[cut].wait_for("and node .* (hears it|does not answer either): its workers are stopped")

        network.heal(cut)
        wait_for_workers(tmp_path, 2, after=alone)
        assert ended == {path: path.read_text() for path in pids}, "the workers of before stayed dead"
        end(runs)


def test_a_stopped_agent_loses_its_workers_with_its_lease_and_joins_again(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    runs = {n: cleanup(node(tmp_path, etcd_server, f"127.0.0.{n}")) for n in (2, 3)}
    both = wait_for_workers(tmp_path, 2)
    runs[2].send(signal.SIGSTOP)
    alone = wait_for_workers(tmp_path, 1, after=both)
    assert not workers_of(runs[2]), "an agent that is stopped has a guardian that is not"
    runs[2].send(signal.SIGCONT)
    runs[2].wait_for("this agent was stopped for .* its workers are stopped")
    wait_for_workers(tmp_path, 2, after=alone)
    assert "restart 1" not in runs[3].output
    end(runs)


def workers_of(run: EtcRun) -> list[int]:
    return [pid for pid, command in marked(run.mark) if "endless.py" in command and "launcher" not in command]


def node_names(etcd: Etcd) -> list[str]:
    names = etcd.keys()
    return [name for name in names if "/nodes/" in name]


def end(runs: dict[Host, EtcRun] | dict[int, EtcRun]) -> None:
    for run in runs.values():
        os.kill(run.process.pid, signal.SIGTERM)
    assert {run.wait() for run in runs.values()} <= {0, 143}
    for run in runs.values():
        run.assert_nothing_left()
