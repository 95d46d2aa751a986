"""Metrics and events as pure functions of records and facts; and serving them."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import which

import pytest

from etc_agent.agent.settings import TelemetrySettings
from etc_agent.agent.telemetry.event_log import EventLog
from etc_agent.agent.telemetry.events import EventKind, Moment, events_between
from etc_agent.agent.telemetry.exporter import Exporter
from etc_agent.agent.telemetry.facts import NodeFacts, WorkerFacts, WorkerState
from etc_agent.agent.telemetry.samples import Family, JobPhase, families, not_ready, phase_of
from etc_agent.agent.telemetry.telemetry import Telemetry
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation, Trigger
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.known.records import (
    Current,
    History,
    Loss,
    NodeRecord,
    NodeState,
    Outcome,
    Phase,
    Reply,
    Request,
    Result,
)
from etc_agent.reconfig.past.goodput import Goodput
from etc_agent.reconfig.sizes.controls import Cordon, Order
from launcher.given import Given
from launcher.options import parse_command_line
from launcher.telemetry import telemetry as settings_of

ROOT = Path(__file__).resolve().parents[2]
A = NodeRecord("a", "127.0.0.2", 1, 1, "one")
FIRST = Generation(1, ParallelConfig(), (Slot("a", 0),), "127.0.0.2:1", 0, "start")
SECOND = replace(FIRST, id=2, previous=1, trigger=Trigger.REQUEST)
STARTED = History(1, "DP1", 0, "start", "committed", started=1, time=5.0)
RECORDS = JobRecords(
    nodes=(A,), leader="a", current=Current(committed=1), generations={1: FIRST}, history={1: STARTED},
    goodput=Goodput(100.0, 30.0, 7),
)
FACTS = NodeFacts("job", "a", "1.0", 3, now=140.0, etcd_seen_at=139.0, is_registered=True, step=7, step_s=0.5)
WORKER = WorkerFacts(0, 4242, 1, WorkerState.TRAINING)


def by_name(records: JobRecords = RECORDS, facts: NodeFacts = FACTS) -> dict[str, Family]:
    return {family.name.removeprefix("etc_run_"): family for family in families(records, facts)}


def values(name: str, records: JobRecords = RECORDS, facts: NodeFacts = FACTS) -> dict[str, object]:
    """The last label's text -> the value."""
    return {[*sample.labels.values()][-1]: sample.value for sample in by_name(records, facts)[name].samples}


# ---- metrics -------------------------------------------------------------------------------------------------------


def test_labels_tell_the_job_or_the_job_and_the_node_and_never_a_rank() -> None:
    for family in families(RECORDS, FACTS):
        keys = {tuple(sample.labels) for sample in family.samples}
        assert len(keys) <= 1, f"{family.name}: all samples of a metric have the same labels"
        for labels in keys:
            assert labels[0] == "run_id"
            assert not {"rank", "pid", "slot"} & set(labels)


def test_docs_and_alerts_name_the_metrics_that_there_are() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(\w+?)(?:_total)?`(?: \(histogram\))? \| (?:job|node) \|", text, re.MULTILINE))
    assert documented == set(by_name())
    used = set()
    for file in (ROOT / "deploy" / "prometheus" / "alerts.yaml", ROOT / "deploy" / "grafana" / "etc-run.json"):
        used |= set(re.findall(r"etc_run_(\w+)", file.read_text()))
    assert {re.sub("_(total|sum|count|bucket)$", "", name) for name in used} <= set(by_name())


@pytest.mark.parametrize(
    ("current", "phase"),
    [
        (Current(), JobPhase.WAITING),
        (Current(committed=1), JobPhase.STEADY),
        (Current(committed=1, proposed=2, phase=Phase.PROPOSED), JobPhase.PROPOSED),
        (Current(committed=1, proposed=2, phase=Phase.ARMED), JobPhase.ARMED),
        (Current(committed=3), JobPhase.HELD),
        (Current(committed=1, loss=Loss(1, ("a/0",), "killed")), JobPhase.LOSS),
        (Current(committed=1, outcome=Outcome.FAILED), JobPhase.ENDED),
    ],
)
def test_one_phase_is_the_jobs(current: Current, phase: JobPhase) -> None:
    generations = {1: FIRST, 2: SECOND, 3: replace(SECOND, id=3, is_held=True)}
    records = replace(RECORDS, current=current, generations=generations)
    assert phase_of(records) is phase
    assert [name for name, value in values("phase", records).items() if value] == [phase]


def test_what_a_node_says_of_itself() -> None:
    hung = replace(WORKER, index=1, pid=1, state=WorkerState.HUNG)
    over = replace(WORKER, index=2, pid=2, state=WorkerState.ENDED, exit_code=0)
    facts = replace(FACTS, workers=(WORKER, hung, over), num_spares=2)
    states = {"starting": 0, "training": 1, "plain": 0, "hung": 1, "spare": 2}
    assert values("workers", facts=facts) == states, "a process that has ended is none"
    assert values("steps_per_second")["a"] == 2.0
    assert values("life_seconds")["job"] == 40.0
    without = by_name(replace(RECORDS, goodput=None), replace(FACTS, step=None))
    assert not {"step", "steps_per_second", "trained_seconds", "life_seconds"} & set(without)


def test_a_node_is_ready_while_it_takes_part() -> None:
    starting = replace(FACTS, workers=(replace(WORKER, state=WorkerState.STARTING),))
    assert not_ready(RECORDS, FACTS) == ""
    assert not_ready(RECORDS, replace(FACTS, is_registered=False)) == "this node is not registered in etcd"
    assert not_ready(RECORDS, replace(FACTS, is_leaving=True)) == "this node was told to leave"
    assert not_ready(RECORDS, starting) == "1 workers are starting"
    assert not_ready(replace(RECORDS, current=Current()), FACTS) == "the job is waiting"


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    exporter = Exporter("127.0.0.1", 0)
    yield exporter
    exporter.close()


def get(exporter: Exporter, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{exporter.address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_what_is_served_is_what_prometheus_reads(exporter: Exporter) -> None:
    assert get(exporter, "/metrics")[0] == 200, "before the first look too"
    assert get(exporter, "/readyz") == (503, "this node is starting\n")
    assert get(exporter, "/healthz") == (200, "ok\n")
    assert get(exporter, "/")[0] == 404
    exporter.observe(RECORDS, FACTS)
    assert get(exporter, "/readyz") == (200, "ok\n")
    _, text = get(exporter, "/metrics")
    assert 'etc_run_step{node="a",run_id="job"} 7.0' in text
    if which("promtool") is None:
        pytest.skip("no promtool (Debian: apt-get install prometheus): the text is not linted")
    linted = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, ""), linted.stderr


def test_every_alert_fires_when_it_must() -> None:
    if which("promtool") is None:
        pytest.skip("no promtool (Debian: apt-get install prometheus): the alerts are not tested")
    rules = ROOT / "deploy" / "prometheus" / "alerts_test.yaml"
    tested = subprocess.run(["promtool", "test", "rules", rules], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    alerts = re.findall(r"- alert: (\w+)", (rules.parent / "alerts.yaml").read_text())
    assert all(f"alertname: {alert}\n" in rules.read_text() for alert in alerts), "each one is seen to fire"


def test_the_dashboard_asks_what_prometheus_understands(tmp_path: Path) -> None:
    if which("promtool") is None:
        pytest.skip("no promtool (Debian: apt-get install prometheus): the dashboard's queries are not checked")
    board = json.loads((ROOT / "deploy" / "grafana" / "etc-run.json").read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    queries = [target["expr"].replace("$__rate_interval", "5m") for target in targets]
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(
        ["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for before, panel in zip(board["panels"], board["panels"][1:], strict=False):
        assert before["gridPos"] != panel["gridPos"], "no panel lies on another"


def test_two_agents_cannot_have_one_port(exporter: Exporter) -> None:
    port = int(exporter.address.rpartition(":")[2])
    with pytest.raises(EtcError, match=f"--metrics-port: cannot listen at 127.0.0.1:{port}"):
        Exporter("127.0.0.1", port)


def test_ipv6_is_listened_at() -> None:
    try:
        exporter = Exporter("::1", 0)
    except EtcError as error:
        pytest.skip(str(error))
    assert get(exporter, "/healthz") == (200, "ok\n")
    exporter.close()


@pytest.mark.parametrize(
    ("text", "metrics"),
    [
        ("9400", ("127.0.0.1", 9400)), ("0.0.0.0:9400", ("0.0.0.0", 9400)), ("[::1]:9400", ("::1", 9400)),
        ("70000", None), ("host:", None), ("9400/metrics", None),
    ],
)
def test_a_port_is_at_loopback_unless_told_otherwise(text: str, metrics: tuple[str, int] | None) -> None:
    given = Given.read(parse_command_line(["--metrics-port", text, "x.py"]))
    if metrics is not None:
        assert settings_of(given).metrics == metrics
    else:
        with pytest.raises(EtcError, match=r"--metrics-port: .* is not a port"):
            settings_of(given)


# ---- events --------------------------------------------------------------------------------------------------------


def happened(after: JobRecords, before: JobRecords = RECORDS, facts: NodeFacts = FACTS) -> dict[str, dict[str, object]]:
    events = [*events_between(Moment(before, FACTS), Moment(after, facts))]
    assert len({event.kind for event in events}) == len(events)
    return {event.kind: dict(event.fields) for event in events}


def test_nothing_happens_between_equal_moments() -> None:
    assert happened(RECORDS) == {}


def test_nodes_come_leave_and_go_and_one_that_comes_back_under_its_name_is_another() -> None:
    assert happened(RECORDS, replace(RECORDS, nodes=())) == {
        "node_joined": {"name": "a", "address": "127.0.0.2", "slots": 1}
    }
    draining = replace(RECORDS, nodes=(replace(A, state=NodeState.DRAINING),))
    assert happened(draining) == {"node_leaves": {"name": "a", "drained": False}}
    assert happened(replace(RECORDS, drains={"a": None})) == {"node_leaves": {"name": "a", "drained": True}}
    assert happened(replace(RECORDS, nodes=())) == {"node_gone": {"name": "a"}}
    assert [*happened(replace(RECORDS, nodes=(replace(A, instance="two"),)))] == ["node_gone", "node_joined"]
    assert happened(replace(RECORDS, leader="")) == {"leader_changed": {"leader": ""}}


def test_what_an_administrator_does_and_is_answered() -> None:
    reply = Reply("2", 9, Result.ACCEPTED, "changing to DP2", 2)
    asked = replace(RECORDS, scale=Request("2", 9), reply=reply)
    assert happened(asked) == {"requested": {"request": "2", "revision": 9}, "answered": reply.to_json()}
    assert happened(replace(RECORDS, paused=True)) == {"paused": {}}
    assert happened(RECORDS, replace(RECORDS, paused=True)) == {"resumed": {}}
    cordoned = replace(RECORDS, cordons=(Cordon("a", 1, Order("hot")),))
    assert happened(cordoned) == {"cordoned": {"name": "a", "slot": 1, "why": "hot"}}
    assert happened(RECORDS, cordoned) == {"uncordoned": {"name": "a", "slot": 1}}
    assert happened(replace(RECORDS, stop=Order("enough"))) == {"stop_ordered": {"why": "enough"}}


def test_a_change_is_told_with_its_phases_and_once_more_when_training_goes_on() -> None:
    generations = {1: FIRST, 2: SECOND}
    proposed = replace(RECORDS, generations=generations, current=Current(1, proposed=2, phase=Phase.PROPOSED))
    assert [*happened(proposed)] == ["proposed"]
    armed = replace(proposed, current=replace(proposed.current, phase=Phase.ARMED))
    assert happened(armed, proposed) == {"armed": {"generation": 2}}
    assert [*happened(armed)] == ["proposed", "armed"], "although nobody looked in between"
    record = History(2, "DP1", 1, "asked", "committed", step=7, phases_ms={"migrate": 3.0}, trigger=Trigger.REQUEST)
    committed = replace(armed, current=Current(2), history={1: STARTED, 2: record})
    (told,) = happened(committed, armed).values()
    assert told["phases_ms"] == {"migrate": 3.0}
    assert told["trigger"] == "request"
    assert not {"time", "event", "node", "run_id"} & set(told), "those of the line itself"
    trains = replace(committed, history={1: STARTED, 2: replace(record, stop_ms=40.0)})
    assert happened(trains, committed) == {"trains_again": {"generation": 2, "step": 7, "stop_ms": 40.0}}


def test_workers_are_told_by_the_node_that_has_them() -> None:
    named = {"slot": 0, "pid": 4242, "generation": 1}
    assert happened(RECORDS, facts=replace(FACTS, workers=(WORKER,))) == {"worker_started": named}
    short = replace(WORKER, state=WorkerState.ENDED, exit_code=137)
    ended = {**named, "exit_code": 137, "was_stopped": False}
    assert happened(RECORDS, facts=replace(FACTS, workers=(short,))) == {"worker_started": named, "worker_ended": ended}


def test_losses_and_the_end_of_the_job() -> None:
    lost = replace(RECORDS, current=Current(1, loss=Loss(3, ("a/0",), "killed")))
    assert happened(lost) == {"workers_lost": {"loss": 3, "slots": ["a/0"], "why": "killed"}}
    over = replace(RECORDS, current=Current(1, outcome=Outcome.FAILED, exit_code=42, why="it raised"))
    assert happened(over) == {"job_ended": {"outcome": "failed", "exit_code": 42, "why": "it raised"}}


def test_docs_describe_every_event() -> None:
    section = (ROOT / "docs" / "metrics.md").read_text().partition("## Events")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*EventKind, "event"}


def test_lines_are_whole_and_begin_with_who_and_when(tmp_path: Path) -> None:
    with Telemetry(TelemetrySettings(events=tmp_path / "events.jsonl"), "job", "host") as telemetry:
        telemetry.observe(RECORDS, FACTS)
        telemetry.observe(replace(RECORDS, paused=True), FACTS)
        telemetry.ended(0, "")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["run_id"], line["node"], line["event"]) for line in lines] == [
        ("job", "host", "agent_started"), ("job", "a", "paused"), ("job", "a", "agent_ended")
    ]


def test_a_start_that_is_refused_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(EtcError), Telemetry(TelemetrySettings(events=tmp_path / "events.jsonl"), "job", "host"):
        raise EtcError("no etcd")
    last = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["exit_code"], last["why"]) == ("agent_ended", 1, "no etcd")


def test_a_full_disk_stops_nothing_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(Path("/dev/full"), "job", "a")
    for moment in (RECORDS, replace(RECORDS, paused=True), RECORDS):
        log.observe(Moment(moment, FACTS))
    log.close()
    assert caplog.text.count("cannot be written") == 1
