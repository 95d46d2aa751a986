"""The command of deploy/container/Dockerfile as a container engine runs it: tini is PID 1 of a PID namespace,
and no process has any privilege."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from running import ROOT, TINY_JOB, Etcd, EtcRun, steps_of, wait_for_more_steps, wait_for_step, wait_until

from etc_agent.rendezvous.private.server import EtcdServer

Cleanup = Callable[[EtcRun], EtcRun]
USER = 1000
CONTAINER = (
    "unshare", "--user", f"--map-user={USER}", f"--map-group={USER}", "--pid", "--fork", "--mount-proc",
    "--kill-child=KILL",
)
ENTRYPOINT = ("tini", "--")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder that the user of the container may enter and write."""
    if missing := [program for program in (CONTAINER[0], ENTRYPOINT[0]) if shutil.which(program) is None]:
        pytest.skip(f"no {', '.join(missing)} (Debian: apt-get install util-linux tini)")
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no user and PID namespaces here: {tried.stderr.strip()}")
    return tmp_path


def pod(home: Path, server: EtcdServer, number: int) -> EtcRun:
    return EtcRun(
        "--nnodes", "1:3", "--nproc-per-node", 1, "--rdzv-id", "job", "--rdzv-conf", "lease_s=4",
        "--etcd-endpoints", server.endpoint, "--local-addr", f"127.0.0.{number}", "--left-exit-code", 75,
        "--verdict", home / f"{number}.json", TINY_JOB, home, 100_000, 0.05, cwd=home,
        prefix=(*CONTAINER, *ENTRYPOINT),
    )


def privileges_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("CapEff:")[2].split()[0], 16)


def first_process(run: EtcRun) -> int:
    """The pid of tini, as seen from here; its parent is `unshare`."""
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children")
    return int(wait_until(lambda: children.read_text().split(), "the container's first process")[0])


def test_the_entrypoint_is_the_one_that_is_tested() -> None:
    text = (ROOT / "deploy" / "container" / "Dockerfile").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("ENTRYPOINT"))
    assert json.loads(line.removeprefix("ENTRYPOINT")) == [*ENTRYPOINT, "etc-run"]
    assert "\nUSER train\n" in text
    assert f"--uid {USER} train" in text


@pytest.mark.sweep
def test_a_drained_container_hands_its_state_over_and_comes_back_under_the_same_name(
    home: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")

    def trains_on(*numbers: int) -> None:
        names = {f"127.0.0.{number}" for number in numbers}
        wait_until(lambda: set((etcd.get("status") or {}).get("nodes", ())) == names, f"a job on {names}")

    first, second = (cleanup(pod(home, etcd_server, number)) for number in (2, 3))
    trains_on(2, 3)
    wait_for_step(home, 3)
    worker = steps_of(home)[-1]["pid"]
    assert worker < 1000, "a PID of its own namespace"
    assert {privileges_of(pid) for pid in second.descendants() if pid != first_process(second)} == {0}

    os.kill(first_process(second), signal.SIGTERM)  # what `docker stop` and a kubelet do
    assert second.wait() == 75, "left, and to be replaced"
    second.assert_nothing_left()
    assert json.loads((home / "3.json").read_text())["outcome"] == "left"
    trains_on(2)
    again = cleanup(pod(home, etcd_server, 3))
    trains_on(2, 3)
    assert {node.rpartition("/")[2] for node in etcd.keys() if "/nodes/" in node} == {  # noqa: SIM118
        "127.0.0.2", "127.0.0.3"
    }

    for pid in again.descendants():  # a signal to everything in the container
        os.kill(pid, signal.SIGTERM)
    assert again.wait() == 75
    trains_on(2)
    wait_for_more_steps(home, 3)
    lines = steps_of(home)
    assert {line["step"] for line in lines} == set(range(lines[-1]["step"] + 1)), "no step was lost"

    os.kill(first_process(first), signal.SIGTERM)
    assert first.wait() == 143
    first.assert_nothing_left()
    assert json.loads((home / "2.json").read_text())["outcome"] == "stopped"
