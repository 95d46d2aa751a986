"""Which ports a job listens at, on a host whose kernel and whose etc-run are both given a range of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from network import Network
from running import TINY_JOB, EtcRun, etcd_of, wait_for_step, wait_for_workers

OURS, EPHEMERAL = range(29500, 29600), range(30000, 31000)
_LISTENS = "0A"


def test_every_port_is_in_one_of_the_two_ranges_that_the_documentation_names(
    tmp_path: Path, cleanup: Callable[[EtcRun], EtcRun], make_network: Callable[[int], Network]
) -> None:
    (host,) = make_network(1).hosts
    bounds = f"net.ipv4.ip_local_port_range={EPHEMERAL.start} {EPHEMERAL.stop - 1}"
    subprocess.run([*host.prefix, "sysctl", "-q", "-w", bounds], check=True)
    job = cleanup(EtcRun(
        "--standalone", "--nproc-per-node", 2, "--rdzv-id", "job", "--parallel", "DP1", "--port-range", "29500-29599",
        TINY_JOB, tmp_path, 100_000, 0.02, "{}", cwd=tmp_path, prefix=host.prefix,
    ))
    wait_for_step(tmp_path, 1)
    etcd_of(job).scale("2")
    wait_for_workers(tmp_path, 2)
    ports = listening(job.process.pid)
    assert {port for port in ports if port not in EPHEMERAL} <= set(OURS)
    assert len([port for port in ports if port in OURS]) >= 2, "a store and the contact point"
    assert any(port in EPHEMERAL for port in ports), "gloo's own"


def listening(pid: int) -> set[int]:
    """The TCP ports at which anybody listens on the host of process `pid`."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == _LISTENS}
