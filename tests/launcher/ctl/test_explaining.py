"""In one sentence: what a job's leader waits for, from the job's records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Frozen
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.known.records import (
    Ack,
    Agreement,
    Current,
    Failure,
    FailureKind,
    GivenUp,
    Loss,
    NodeRecord,
    Outcome,
    Phase,
    Reply,
    Request,
    Result,
)
from etc_agent.reconfig.sizes.controls import Order
from launcher.ctl.job.explaining import explain
from launcher.ctl.job.jobs import Job

GENERATION = Generation(
    3, ParallelConfig(dp=2), (Slot("a", 0), Slot("b", 0)), "s:1", previous=2, reason="asked for 2"
)
NEXT = replace(GENERATION, id=4, config=ParallelConfig(dp=4), previous=3, reason="nodes came",
               placement=(Slot("a", 0), Slot("b", 0), Slot("a", 1), Slot("c", 0)))
NODES = tuple(NodeRecord(name, "127.0.0.1", 2, 1, name) for name in "abc")
RUNNING = Current(committed=3, next_id=5)


def job(
    current: Current = RUNNING, *acks: Ack, nodes: str = "abc", leader: str = "a",
    status: Mapping[str, Any] | None = None, reply: Reply | None = None, pause: Order | None = None, **records: Any,
) -> Job:
    known = {(ack.generation, ack.node): ack for ack in acks}
    generations = {each.id: each for each in (GENERATION, NEXT) if each.id in (current.committed, current.proposed)}
    present = tuple(node for node in NODES if node.name in nodes)
    read = JobRecords(nodes=present, leader=leader, current=current, generations=generations, acks=known, **records)
    return Job("demo", read, {"nnodes": "2:4"}, status or {}, reply, pause)


CHANGING = replace(RUNNING, proposed=4, phase=Phase.PROPOSED)
LOSING = replace(RUNNING, loss=Loss(1, ("b/0",), "b/0 was killed"), losses=1)
CASES = {
    "Nothing to do": (job(), "The leader waits for nothing: the job trains as PP1TP1DP2."),
    "over": (
        job(replace(RUNNING, outcome=Outcome.FAILED, why="a/0 raised")), "The job has failed: a/0 raised.",
    ),
    "gone": (job(nodes=""), "No node of the job is here: its agents have ended, or"),
    "no leader": (job(leader=""), "No node leads at this moment"),
    "stopping": (job(stop=Order("enough")), "An administrator has told the job to stop"),
    "preparing": (
        job(CHANGING, Ack(4, "a", prepared="d"), Ack(4, "c", prepared="d")),
        "Generation 4, PP1TP1DP4 (nodes came), is prepared beside training: 2 of 3 nodes are ready, b not yet.",
    ),
    "armed": (
        job(replace(CHANGING, phase=Phase.ARMED), Ack(4, "a", switched=True), Ack(4, "c", switched=True)),
        "Generation 4, PP1TP1DP4 (nodes came), is prepared; b switch after the training step under way.",
    ),
    "freezing": (
        job(LOSING, Ack(3, "b", frozen=Frozen(1, 3, 7))),
        "Generation 3 has lost b/0 (b/0 was killed); it waits for the workers of a to say which step",
    ),
    "lost again after they agreed": (
        job(
            replace(LOSING, loss=Loss(2, ("b/0",), "b/0 was killed", Agreement(3, 7, loss=1))),
            Ack(3, "b", frozen=Frozen(2, 3, 7)),
        ),
        "Generation 3 has lost b/0 (b/0 was killed); it waits for the workers of a to say which step",
    ),
    "agreed": (
        job(replace(LOSING, loss=Loss(1, ("b/0",), "b/0 was killed", Agreement(3, 7, loss=1)))),
        "Generation 3 has lost b/0 (b/0 was killed); the survivors continue from step 7, in a generation",
    ),
    "failed": (
        job(RUNNING, Ack(3, "a", failure=Failure("a/0", FailureKind.SILENT, 1, "exit code 1"))),
        "The worker on a/0 failed (silent: exit code 1); the leader finds out what has to restart.",
    ),
    "absent": (job(nodes="ac"), "Node b is gone from etcd; until its workers have certainly stopped"),
    "the leader's word": (
        job(status={"why": "waiting for nodes: 1 of at least 2 nodes (--nnodes) are here"}),
        "Waiting for nodes: 1 of at least 2 nodes (--nnodes) are here.",
    ),
    "not started": (
        job(Current(), nodes="a"), "The job has not started: 1 of at least 2 nodes (--nnodes) are here.",
    ),
    "paused": (
        job(pause=Order("measuring", "ada"), scale=Request("8", 9)),
        "Nothing changes while the job is paused (measuring (by ada)); the job trains as PP1TP1DP2, and the request 8",
    ),
    "paused without a reason": (
        job(pause=Order(by="ada")), "Nothing changes while the job is paused (by ada); the job trains as PP1TP1DP2.",
    ),
    "asked": (job(scale=Request("8", 9)), "The request 8 was just written, and the leader has not answered it yet."),
    "pending": (
        job(
            replace(RUNNING, pending_scale=9, handled_scale=9, given_up=(GivenUp("DP8", ErrorKind.RAISED, "x"),)),
            reply=Reply("8", 9, Result.PENDING, "waiting for nodes"),
        ),
        "The request 8 is pending: waiting for nodes.",
    ),
    "finishing": (
        job(RUNNING, Ack(3, "b", finished=True)), "Workers of b have finished; the job ends when all have.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_names_what_is_waited_for(case: str) -> None:
    given, said = CASES[case]
    assert explain(given).startswith(said)
    assert explain(given).endswith(".")


def test_the_workers_of_a_fresh_generation_that_have_not_opened_a_session_are_named() -> None:
    fresh = job()
    generation = replace(GENERATION, previous=0)
    records = replace(fresh.records, generations={3: generation}, acks={(3, "a"): Ack(3, "a", in_session=True)})
    assert explain(replace(fresh, records=records)) == (
        "The workers of generation 3 on b start, or run a script without a session."
    )
