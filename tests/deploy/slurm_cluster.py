"""A real Slurm cluster of three nodes on this host: slurmctld and three slurmd at loopback, without munge."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

from etc_agent.rendezvous.addresses import LOOPBACK

NODES = ("n2", "n3", "n4")
"""Node nN has the address 127.0.0.N."""
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel")
_CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MinJobAge=300
KillWait=30
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no cluster here; None where there can."""
    missing = [program for program in _PROGRAMS if which(program, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)} (Debian: apt-get install slurmctld slurmd slurm-client)"
    return None if os.geteuid() == 0 else "slurmd needs root"


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain for {what}"
        time.sleep(0.1)
    return value


class Cluster:
    """Commands for a person on the cluster. `environment`: with which they are run."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def run(self, *words: object, **variables: str) -> str:
        ended = subprocess.run(
            [str(word) for word in words], env={**self.environment, **variables}, cwd=self.folder, capture_output=True,
            text=True, timeout=60, check=False,
        )
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def state(self, job: str) -> str:
        """Such as RUNNING, COMPLETED or FAILED."""
        match = re.search(r"JobState=(\S+)", self.run("scontrol", "show", "job", job))
        assert match is not None
        return match[1]

    def wait_for_state(self, job: str, *states: str) -> str:
        return str(wait_until(lambda: (now := self.state(job)) in states and now, f"job {job} to be {states}"))

    def output(self, job: str) -> str:
        file = self.folder / f"slurm-{job}.out"
        return file.read_text(errors="replace") if file.exists() else ""


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster whose files are in `folder`; nothing of it is left behind."""
    ports = _free_ports(len(NODES) + 1)
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr={LOOPBACK} Port={port} CPUs=1"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    conf, prolog = folder / "slurm.conf", folder / "prolog"
    conf.write_text(_CONF.format(host=host, address=LOOPBACK, port=ports[0], folder=folder, nodes=nodes))
    prolog.write_text('#!/bin/sh\necho "export PET_LOCAL_ADDR=127.0.0.${SLURMD_NODENAME#n}"\n')
    prolog.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ETC_", "PET_", "SLURM"))}
    environment = {**inherited, "SLURM_CONF": str(conf), "PATH": _path(), "OMP_NUM_THREADS": "1", "ETC_SPARES": "cold"}
    commands = [["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    daemons: list[subprocess.Popen[bytes]] = []
    found = Cluster(folder, environment)
    try:
        for number, command in enumerate(commands):
            with (folder / f"daemon.{number}").open("wb") as out:
                daemons.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=folder))
        wait_until(lambda: _idle(found) == len(NODES), "three idle nodes", 60)
        yield found
    finally:
        _end(found, daemons)


def _end(found: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    if daemons and daemons[0].poll() is None:
        for job in found.run("squeue", "--noheader", "--format=%i").split():
            subprocess.run(["scancel", "--full", "--signal=KILL", job], env=found.environment, timeout=30, check=False)
            subprocess.run(["scancel", job], env=found.environment, timeout=30, check=False)
        wait_until(lambda: not found.run("squeue", "--noheader").strip(), "the end of every job", 60)
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(30)


def _idle(found: Cluster) -> int:
    listed = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%t"], env=found.environment, capture_output=True, text=True,
        timeout=30, check=False,
    )
    return listed.stdout.split().count("idle")


def _path() -> str:
    """With this environment's etc-run, and the places where Debian has daemons."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind((LOOPBACK, 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
