"""How much sooner a worker joins from a warm spare than from nothing.

A job on this machine grows from one worker to two and shrinks again, in turns, with warm spares and without. Measured
is the time from the moment in which the agent starts the joining worker (or tells the spare to begin) until that
worker's session says hello: the part of a joiner's start that a spare takes away. What a waiting spare costs is shown
too. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 180.0
_MODEL = ("--layers=2", "--hidden=64", "--heads=4", "--global-batch=32", "--steps=1000000")
_HELLO = re.compile(r"/1 said hello in ([0-9.]+) s")


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise click.ClickException(f"waited {TIMEOUT_S:.0f} s in vain for {what}")


class Spare:
    """The waiting spare among the children of the agent `pid`, by what /proc says of it."""

    def __init__(self, agent: int) -> None:
        self._agent = agent
        self.pid = 0

    def is_warm(self) -> bool:
        """Whether there is one that has been at rest for a second."""
        try:
            return self._is_at_rest()
        except OSError:  # it was a worker on its way out
            return False

    def _is_at_rest(self) -> bool:
        children = Path(f"/proc/{self._agent}/task/{self._agent}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        found = [pid for pid, command in commands.items() if b"etc_agent.worker.process.spare" in command]
        if not found:
            return False
        self.pid = found[0]
        before = self.cpu_s()
        time.sleep(1.0)
        return 0.5 < before == self.cpu_s()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """What it has for itself alone."""
        rollup = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        return sum(int(kb) for kb in re.findall(r"^Private_\w+: +(\d+) kB", rollup, re.MULTILINE)) / 1e3


def joins(kind: str, rounds: int, folder: Path) -> tuple[list[float], float]:
    """Seconds until hello of each joiner, and the memory of a waiting spare in MB."""
    log = folder / f"{kind}.txt"
    command = [sys.executable, "-m", "launcher.run", "--standalone", "--nproc-per-node", "2", "--parallel", "PP1TP1DP1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ETC_SPARES": kind, "ETC_LOG_LEVEL": "DEBUG"}
    memory_mb = 0.0
    with log.open("w") as output:
        job = subprocess.Popen(
            [*command, str(ROOT / "scripts" / "train_gpt.py"), *_MODEL], cwd=ROOT, env=environment, stdout=output,
            stderr=output,
        )
    try:
        match = wait_until(lambda: re.search(r"etcd: (\S+) run id: (\S+)", log.read_text()), "the job's etcd")
        spare = Spare(job.pid)
        with EtcdClient([match[1]]) as client:
            keys = JobKeys(match[2])
            for number in range(rounds):
                if kind == "warm":
                    wait_until(spare.is_warm, "a warm spare")
                    memory_mb = spare.memory_mb()
                _scale(client, keys, 2)
                wait_until(lambda n=number: len(_HELLO.findall(log.read_text())) > n, "the joiner's hello")
                _scale(client, keys, 1)
    finally:
        job.send_signal(signal.SIGINT)
        job.wait(60)
    return [float(text) for text in _HELLO.findall(log.read_text())], memory_mb


def _scale(client: EtcdClient, keys: JobKeys, workers: int) -> None:
    """Ask for so many workers, and wait until the job has them."""
    revision = client.put(keys.scale, str(workers))

    def is_done() -> bool:
        entry = client.get(keys.reply)
        reply = entry.json() if entry else {}
        return reply.get("revision") == revision and reply["result"] == "done"

    wait_until(is_done, f"{workers} workers")


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True, help="Joiners of each kind.")
def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="etc-run-bench-") as name:
        cold, _ = joins("cold", rounds, Path(name))
        warm, memory_mb = joins("warm", rounds, Path(name))
    medians = {"cold_hello_s": statistics.median(cold), "warm_hello_s": statistics.median(warm)}
    ratio = medians["cold_hello_s"] / medians["warm_hello_s"]
    for kind, times in (("cold", cold), ("warm", warm)):
        print(f"{kind}: " + ", ".join(f"{seconds:.2f}" for seconds in times) + " s until hello")
    print(f"a spare keeps {memory_mb:.0f} MB for itself")
    print(json.dumps({**medians, "cold_over_warm": round(ratio, 1), "spare_memory_mb": round(memory_mb)}))


if __name__ == "__main__":
    main()
