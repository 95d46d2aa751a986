"""Plain torchrun over our rendezvous: real agents, real workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_helpers import wait_until

from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.server import EtcdServer

WORKER = Path(__file__).with_name("torchrun_worker.py")


class Job:
    """Agents of one run, by name, and what their workers last said."""

    def __init__(self, endpoint: str, run_id: str, folder: Path) -> None:
        self.endpoint, self.run_id, self.folder = endpoint, run_id, folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=3"),
            *("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={self.run_id}"),
            *("--rdzv-conf=last_call_timeout=1,lease_ttl=3", "--local-addr=127.0.0.1", str(WORKER), str(self.folder)),
        ]
        environment = {**os.environ, "NODE": name, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.out").open("wb") as output:
            self.agents[name] = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _last_steps(self) -> list[dict[str, Any]]:
        texts = [path.read_text() for path in self.folder.glob("*.jsonl")]
        lines = [text.rpartition("\n")[0].rpartition("\n")[2] for text in texts]
        return [json.loads(line) for line in lines if line]

    def wait_for_nodes(self, *names: str) -> dict[str, dict[str, Any]]:
        """Wait until exactly these nodes step together, over one store; what their workers said, by node."""

        def newest_generation() -> dict[str, dict[str, Any]]:
            steps = self._last_steps()
            port = max(steps, key=lambda step: step["time"])["port"] if steps else None
            return {step["node"]: step for step in steps if step["port"] == port and step["present"] == len(names)}

        wait_until(lambda: set(newest_generation()) == set(names), 90)
        return newest_generation()

    def end(self) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
            agent.wait()
        for step in self._last_steps():
            command = Path(f"/proc/{step['pid']}/cmdline")
            with contextlib.suppress(OSError):
                if os.fsencode(self.folder) in command.read_bytes():
                    os.kill(step["pid"], signal.SIGKILL)


@pytest.fixture
def job(shared_etcd: EtcdServer, keys: JobKeys, tmp_path: Path) -> Iterator[Job]:
    job = Job(shared_etcd.endpoint, keys.run_id, tmp_path)
    yield job
    job.end()


@pytest.mark.timeout(300)
def test_a_job_grows_by_a_joiner_and_outlives_the_agent_that_hosts_its_store(job: Job) -> None:
    job.start("a")
    job.wait_for_nodes("a")
    job.start("b")
    two = job.wait_for_nodes("a", "b")
    assert (two["a"]["rank"], two["b"]["rank"]) == ("0", "1")
    job.agents["a"].kill()  # no word to anybody; torchrun leaves its worker behind
    job.start("c")
    left = job.wait_for_nodes("b", "c")
    assert (left["b"]["rank"], left["c"]["rank"]) == ("0", "1")
    assert left["b"]["port"] != two["b"]["port"]
    (job.folder / "stop").touch()
    assert [job.agents[name].wait(60) for name in "bc"] == [0, 0]
