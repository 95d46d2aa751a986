"""deploy/slurm on a real Slurm cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster, cluster, wait_until, why_not

from etc_agent.rendezvous.private.server import EtcdServer

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "deploy" / "slurm"
TINY_JOB = ROOT / "tests" / "worker" / "tiny_job.py"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    if (why := why_not()) is not None:
        pytest.skip(why)
    with EtcdServer() as etcd, cluster(tmp_path) as found:
        found.environment |= {"ETC_ENDPOINTS": etcd.endpoint, "NPROC": "1", "ETC_RUN_OPTIONS": "--rdzv-conf lease_s=4"}
        yield found


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = []
    for file in folder.glob("steps-*.jsonl"):
        lines += [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return sorted(lines, key=lambda line: line["step"])


def status(slurm: Cluster) -> dict[str, Any]:
    etcdctl = ["etcdctl", f"--endpoints={slurm.environment['ETC_ENDPOINTS']}", "get", "--print-value-only"]
    text = subprocess.run(
        [*etcdctl, "/etc-run/train/status"], env={**slurm.environment, "ETCDCTL_API": "3"}, capture_output=True,
        text=True, check=True, timeout=30,
    ).stdout
    return json.loads(text) if text.strip() else {}


def wait_for_nodes(slurm: Cluster, *nodes: int) -> None:
    names = {f"127.0.0.{node}" for node in nodes}
    wait_until(lambda: set(status(slurm).get("nodes", ())) == names, f"a job on {names}")


def wait_for_more_steps(folder: Path, count: int) -> None:
    last = max((line["step"] for line in steps_of(folder)), default=0)
    wait_until(lambda: steps_of(folder)[-1]["step"] >= last + count, f"{count} steps more")


def verdict(slurm: Cluster, job: str, node: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((slurm.folder / "train" / f"verdict.{job}.127.0.0.{node}.json").read_text())
    return found


def agent_on(node: int) -> int:
    """The pid of the etc-run task on a node."""
    marks = {f"SLURMD_NODENAME=n{node}", "SLURM_JOB_NAME=train"}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(word.endswith("/etc-run") for word in words[:2]) and marks <= set(variables):
                return int(folder.name)
    raise AssertionError(f"no etc-run on n{node}")


@pytest.mark.sweep
def test_a_job_grows_by_a_second_slurm_job_survives_the_first_ones_end_and_goes_on_with_its_chain(
    slurm: Cluster, tmp_path: Path
) -> None:
    script = (RECIPE / "etc-run.sbatch", TINY_JOB, tmp_path, 100_000, 0.05)
    chain = slurm.run(
        RECIPE / "chain.sh", 2, "--job-name=train", "--nodes=1", "--nodelist=n2", *script
    ).split()
    wait_for_nodes(slurm, 2)
    grown = slurm.run("sbatch", "--parsable", "--job-name=train", "--nodes=2", "--nodelist=n3,n4", *script).strip()
    wait_for_nodes(slurm, 2, 3, 4)
    wait_for_more_steps(tmp_path, 5)

    # What preemption, or --signal before the time limit, does: the step's tasks get SIGTERM.
    slurm.run("scancel", "--signal=TERM", chain[0])
    assert slurm.wait_for_state(chain[0], "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", slurm.output(chain[0])
    left = verdict(slurm, chain[0], 2)
    assert (left["outcome"], left["exit_code"], left["start_again"]) == ("left", 0, True)

    # The next link sees that there is something left to do, and comes back under the same name.
    slurm.wait_for_state(chain[1], "RUNNING")
    wait_for_nodes(slurm, 2, 3, 4)
    wait_for_more_steps(tmp_path, 5)
    lines = steps_of(tmp_path)
    assert {line["step"] for line in lines} == set(range(lines[-1]["step"] + 1)), "no step was lost"
    assert len({line["pid"] for line in lines}) == 4, "no worker was restarted"

    # A task that ends badly takes no other task with it.
    os.kill(agent_on(4), signal.SIGKILL)
    wait_for_nodes(slurm, 2, 3)
    wait_for_more_steps(tmp_path, 5)
    assert slurm.state(grown) == "RUNNING"
    assert verdict(slurm, grown, 4)["outcome"] == "running", "who was killed cannot say so"

    # scancel of a whole Slurm job: SIGTERM to every process of its steps, and SIGKILL only KillWait later.
    slurm.run("scancel", grown)
    slurm.wait_for_state(grown, "CANCELLED")
    wait_until(lambda: verdict(slurm, grown, 3)["outcome"] == "left", "the handing over of node 3's state")
    wait_for_nodes(slurm, 2)
    wait_for_more_steps(tmp_path, 5)
    slurm.run("scancel", "--signal=TERM", chain[1])
    slurm.wait_for_state(chain[1], "FAILED")
    stopped = verdict(slurm, chain[1], 2)
    assert (stopped["outcome"], stopped["exit_code"], stopped["start_again"]) == ("stopped", 143, True)


@pytest.mark.sweep
def test_the_links_after_the_one_that_succeeds_do_nothing(slurm: Cluster, tmp_path: Path) -> None:
    script = (RECIPE / "etc-run.sbatch", TINY_JOB, tmp_path, 20, 0.01)
    chain = slurm.run(RECIPE / "chain.sh", 2, "--job-name=train", "--nodes=2", *script).split()
    for job in chain:
        assert slurm.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", slurm.output(job)
    assert verdict(slurm, chain[0], 2)["outcome"] == "succeeded"
    assert "has left nothing to do" in slurm.output(chain[1])
    assert not list((tmp_path / "train").glob(f"verdict.{chain[1]}.*"))


def test_the_recipe_is_right_bash() -> None:
    for file in RECIPE.iterdir():
        checked = subprocess.run(["bash", "-n", file], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


def test_slurm_waits_long_enough_for_the_state_to_be_handed_over() -> None:
    text = (RECIPE / "etc-run.sbatch").read_text()
    program = "from etc_agent.agent.settings import Timeouts as T; print(T().drain_s + T().shutdown_grace_s)"
    needed_s = float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert float(text.split("--signal=TERM@")[1].split()[0]) > needed_s
