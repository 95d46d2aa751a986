"""State that one node alone holds is lost with it: all go back to copies in memory, and no disk is touched."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from injection import INJECTED_JOB, options_json
from running import Etcd, EtcRun, wait_until

from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.private.server import EtcdServer
from tests.worker.replay import differences, legs_of, lines_of, replay

Cleanup = Callable[[EtcRun], EtcRun]


@dataclass(frozen=True)
class Case:
    """What is lost: the `whole_node` of the last rank, or that worker. `full`: a config without state on two nodes."""

    scheme: str
    num_nodes: int
    full: str
    whole_node: bool

    @property
    def num_workers(self) -> int:
        """On each node."""
        return ParallelConfig.parse(self.full).num_ranks // self.num_nodes


def started(case: Case, tmp_path: Path, cleanup: Cleanup, server: EtcdServer) -> list[EtcRun]:
    """The job's nodes."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job.yaml").write_text(
        f"redundancy: {{scheme: {case.scheme}, every: 3}}\n"
        f"parallel: {{initial: {case.full}, allowed: [{case.full}, PP2TP1DP1]}}\n"
    )
    return [
        cleanup(EtcRun(
            "--nnodes", f"1:{case.num_nodes}", "--nproc-per-node", case.num_workers,
            "--rdzv-id", "job", "--etcd-endpoints", server.endpoint,
            "--config", tmp_path / "job.yaml", "--local-addr", f"127.0.0.{number}", "--max-restarts", 0,
            INJECTED_JOB, tmp_path / "job", 1_000_000, 0.02, options_json(model="gpt"), cwd=tmp_path,
        ))
        for number in range(2, 2 + case.num_nodes)
    ]


def settled(etcd: Etcd, config: str) -> dict[str, Any]:
    """The committed generation, once it has `config` and no change is under way."""

    def found() -> dict[str, Any] | None:
        current = etcd.get("current") or {}
        assert not current.get("outcome"), current
        if not current.get("committed") or current["proposed"] or current["loss"]:
            return None
        generation = etcd.get(f"generations/{current['committed']}")
        return generation if generation["config"] == config else None

    return wait_until(found, f"{config} to train")


def await_copies(etcd: Etcd) -> None:
    wait_until(lambda: "back to step" in _said(etcd), "copies")


def _said(etcd: Etcd) -> str:
    return ((etcd.get("status") or {}).get("survives") or {}).get("said", "")


@pytest.mark.parametrize(
    "case",
    [
        Case("peer", 2, "PP2TP2DP1", whole_node=True),
        pytest.param(Case("peer", 2, "PP2TP2DP1", whole_node=False), marks=pytest.mark.long),
        pytest.param(Case("parity", 3, "PP3TP1DP1", whole_node=True), marks=pytest.mark.long),
    ],
    ids=["a node", "a worker", "a node of three with parity"],
)
def test_all_go_back_to_one_step_and_train_on_in_the_same_processes(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer, case: Case
) -> None:
    etcd, folder = Etcd(etcd_server.endpoint, "job"), tmp_path / "job"
    runs = started(case, tmp_path, cleanup, etcd_server)
    last_rank = case.num_nodes * case.num_workers - 1
    before = settled(etcd, case.full)
    await_copies(etcd)
    assert _said(etcd).startswith("any one node")
    pids = {line["rank"]: line["pid"] for line in lines_of(folder) if line["generation"] == before["id"]}
    doomed = next(run for run in runs if pids[last_rank] in run.descendants())
    if case.whole_node:
        doomed.send(signal.SIGKILL)
    else:
        os.kill(pids[last_rank], signal.SIGKILL)
        wait_until(lambda: _recovered(etcd, before["id"]), "a recovery")
    after = settled(etcd, "PP2TP1DP1") if case.whole_node else _recovered(etcd, before["id"])
    assert after is not None
    back_to = int(re.search(r"from the copies of step (\d+)", after["reason"])[1])  # type: ignore[index]
    if not case.whole_node:
        wait_until(lambda: (etcd.get("current") or {}).get("committed", 0) > after["id"], "the job to grow back")
        settled(etcd, case.full)
    last = lines_of(folder)[-1]["step"] + 20
    (folder / "last.part").write_text(str(last))
    (folder / "last.part").rename(folder / "last")
    for run in runs:
        if run is not doomed or not case.whole_node:
            assert run.wait() == 0, run.output
    current = etcd.get("current")
    assert (current["restarts"], current["losses"]) == (0, 1)

    # Later steps of that generation ran in vain.
    lines = [line for line in lines_of(folder) if line["generation"] > before["id"] or line["step"] < back_to]
    survivors = {line["pid"] for line in lines if line["generation"] == after["id"]}
    assert survivors <= set(pids.values()), "the survivors' processes go on"
    assert {line["step"] for line in lines} == set(range(last + 1))
    assert differences(lines, replay(tmp_path / "replay", legs_of(lines), last, {"model": "gpt"}), set()) == []


def _recovered(etcd: Etcd, before: int) -> dict[str, Any] | None:
    """The generation that followed the loss in generation `before`."""
    committed = (etcd.get("current") or {}).get("committed", 0)
    found = [etcd.get(f"generations/{number}") for number in range(before + 1, committed + 1)]
    return next((generation for generation in found if generation and generation["lost"]), None)
