"""What a job tells to the outside over a change, a drain and a failure: metrics, events and verdicts, against its
history in etcd."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import TINY_JOB, Etcd, EtcRun, standalone, steps_of, wait_for_more_steps, wait_for_step, wait_until

from etc_agent.rendezvous.private.server import EtcdServer

Cleanup = Callable[[EtcRun], EtcRun]
LOSSES = ("node_lost", "worker_raised", "worker_killed", "worker_hung", "worker_ended", "connection_lost")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def node(tmp_path: Path, server: EtcdServer, number: int) -> EtcRun:
    return EtcRun(
        "--nnodes", "1:3", "--nproc-per-node", 1, "--rdzv-id", "job", "--rdzv-conf", "lease_s=4", "--max-restarts", 3,
        "--etcd-endpoints", server.endpoint, "--local-addr", f"127.0.0.{number}",
        "--metrics-port", 0, "--events", tmp_path / "{node}.jsonl", "--verdict", tmp_path / "{node}.json",
        TINY_JOB, tmp_path, 100_000, 0.05, cwd=tmp_path,
    )


def get(job: EtcRun, path: str) -> tuple[int, str]:
    url = job.wait_for(r"metrics at (http://\S+)/metrics")[1]
    try:
        with urllib.request.urlopen(url + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(job: EtcRun) -> Samples:
    """(name, labels) -> value, without the label run_id, which is the same in all."""
    status, text = get(job, "/metrics")
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert samples
    assert all(sample.labels["run_id"] == "job" and "rank" not in sample.labels for sample in samples)
    return {
        (sample.name, tuple(sorted((name, text) for name, text in sample.labels.items() if name != "run_id"))):
        sample.value for sample in samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((f"etc_run_{name}", tuple(sorted(labels.items()))), 0.0)


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum over all labels that are not given."""
    return sum(
        value for (other, found), value in samples.items()
        if other == f"etc_run_{name}" and labels.items() <= dict(found).items()
    )


def of_job(samples: Samples) -> Samples:
    """Those that every agent has, without the clock."""
    return {
        key: value for key, value in samples.items()
        if "node" not in dict(key[1]) and key[0] not in ("etc_run_life_seconds_total", "etc_run_trained_seconds_total")
    }


def history_of(etcd: Etcd) -> list[dict[str, Any]]:
    keys = [key for key in etcd.keys() if "/job/history/" in key]  # noqa: SIM118
    return sorted((etcd.get(key.removeprefix("/etc-run/job/")) for key in keys), key=lambda each: each["generation"])


def assert_equal_to(history: list[dict[str, Any]], samples: Samples) -> None:
    """Every number of the job that is a sum over its history, worked out again from the records."""
    changes = Counter((each["outcome"], each["trigger"]) for each in history)
    for (outcome, trigger), count in changes.items():
        assert value(samples, "reconfigurations_total", outcome=outcome, reason=trigger) == count
    assert total(samples, "reconfigurations_total") == len(history)
    fresh = [each for each in history if each["previous"] == 0]
    assert total(samples, "restarts_total") == len(fresh) - 1
    committed = [each for each in history if each["outcome"] == "committed"]
    losses = Counter(each["trigger"] for each in committed if each["trigger"] in LOSSES)
    assert total(samples, "failures_handled_total") == losses.total()
    for kind, count in losses.items():
        assert value(samples, "failures_handled_total", kind=kind) == count
    assert value(samples, "hangs_total") == losses["worker_hung"]
    assert value(samples, "moved_bytes_total") == sum(each["moved_bytes"] for each in history)
    for name, is_loss in (("stop_seconds", False), ("recovery_seconds", True)):
        records = [each for each in history if (each["trigger"] in LOSSES) is is_loss]
        stops = [each["stop_ms"] / 1e3 for each in records if each["stop_ms"] is not None]
        assert value(samples, f"{name}_count") == len(stops)
        assert abs(value(samples, f"{name}_sum") - sum(stops)) < 1e-6
        for le in (0.05, 0.1, 1.0):
            assert value(samples, f"{name}_bucket", le=str(le)) == sum(stop <= le for stop in stops)
    for name, prefix in (("phases_ms", ""), ("prepare_ms", "prepare_")):
        for phase in {phase for each in history for phase in each[name]}:
            durations = [each[name][phase] / 1e3 for each in history if phase in each[name]]
            assert value(samples, "phase_seconds_count", phase=prefix + phase) == len(durations)
            assert abs(value(samples, "phase_seconds_sum", phase=prefix + phase) - sum(durations)) < 1e-6


def events_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.long
def test_every_number_is_that_of_the_history_over_a_change_a_drain_and_a_failure(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")

    def trains_on(num_nodes: int) -> None:
        def is_so() -> bool:
            status, current = etcd.get("status") or {}, etcd.get("current") or {}
            return len(status.get("nodes", ())) == num_nodes and not current["proposed"] and not current["unreported"]

        wait_until(is_so, f"a job on {num_nodes} nodes")

    first = cleanup(node(tmp_path, etcd_server, 2))
    wait_for_step(tmp_path, 3)
    assert get(first, "/healthz") == (200, "ok\n")
    second, third = (cleanup(node(tmp_path, etcd_server, number)) for number in (3, 4))
    trains_on(3)
    samples = scrape(first)
    assert value(samples, "is_leader", node="127.0.0.2") == 1
    assert value(samples, "workers", node="127.0.0.2", state="training") == 1
    assert value(samples, "parallel_degree", axis="dp") == 3
    assert value(samples, "phase", phase="steady") == 1

    etcd.put("control/drain/127.0.0.2", "")  # the leader
    assert first.wait() == 0
    trains_on(2)
    assert_equal_to(history_of(etcd), scrape(second))
    wait_until(lambda: get(second, "/readyz") == (200, "ok\n"), "readiness")

    generation = etcd.get("current")["committed"]
    victim = next(line["pid"] for line in reversed(steps_of(tmp_path)) if line["generation"] == generation)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: etcd.get("current")["committed"] > generation, "a generation after the failure")
    trains_on(2)
    wait_for_more_steps(tmp_path, 20)

    history = history_of(etcd)
    wait_until(lambda: of_job(scrape(second)) == of_job(scrape(third)), "the same numbers of the job on both nodes")
    samples = {**scrape(second), **scrape(third)}
    assert_equal_to(history, samples)
    assert value(samples, "generation") == history[-1]["generation"] == etcd.get("current")["committed"]
    assert value(samples, "restart_budget_remaining") == 3 - etcd.get("current")["restarts"]
    assert value(samples, "failures_handled_total", kind="worker_killed") == 1
    assert total(samples, "restarts_total") == 0, "the survivor went on in place"
    assert value(samples, "recovery_seconds_count") == 1
    assert value(samples, "steps_redone_total") == 0
    assert total(samples, "is_leader") == 1, "a drained leader's place is taken"
    trained_s, life_s = value(samples, "trained_seconds_total"), value(samples, "life_seconds_total")
    assert 0 < trained_s < life_s
    num_steps = max(line["step"] for line in steps_of(tmp_path))
    assert trained_s > 0.5 * 0.05 * num_steps, "most steps count with what a step takes at least"

    for number in (3, 4):
        events = events_of(tmp_path / f"127.0.0.{number}.jsonl")
        seen = {each["generation"] for each in events if each["event"] in ("committed", "withdrawn")}
        assert seen >= {each["generation"] for each in history if each["generation"] > 3}
        for each in events:
            if each["event"] == "trains_again":
                (record,) = (record for record in history if record["generation"] == each["generation"])
                assert each["stop_ms"] == record["stop_ms"]
        kinds = Counter(each["event"] for each in events)
        assert kinds["worker_started"] >= 1
        assert kinds["leader_changed"] >= 1
        assert {"name": "127.0.0.2", "drained": True}.items() <= next(
            each for each in events if each["event"] == "node_leaves"
        ).items()
    for run in (second, third):
        run.send(signal.SIGTERM)
    assert {second.wait(), third.wait()} <= {0, 143}

    left = json.loads((tmp_path / "127.0.0.2.json").read_text())
    assert (left["outcome"], left["exit_code"], left["start_again"]) == ("left", 0, False)
    ends = [json.loads((tmp_path / f"127.0.0.{number}.json").read_text()) for number in (3, 4)]
    stopped = [end for end in ends if end["outcome"] == "stopped"]
    assert stopped, "the last node is stopped, not drained"
    assert all(end["start_again"] and end["exit_code"] == 143 for end in stopped)
    assert stopped[0]["step"] >= num_steps - 40, "workers tell their step once a second"
    assert events_of(tmp_path / "127.0.0.3.jsonl")[-1]["event"] == "agent_ended"


def test_a_job_of_one_node_says_how_it_has_ended(tmp_path: Path, cleanup: Cleanup) -> None:
    verdict = tmp_path / "verdict.json"

    def outcome() -> tuple[Any, ...]:
        found = json.loads(verdict.read_text())
        return found["outcome"], found["exit_code"], found["start_again"]

    def ended(*script: object) -> EtcRun:
        job = cleanup(standalone(tmp_path, *script, slots=1, options=("--verdict", verdict)))
        job.wait()
        return job

    ended(TINY_JOB, tmp_path, 5, 0)
    assert outcome() == ("succeeded", 0, False)
    assert json.loads(verdict.read_text())["step"] == 5
    failing = tmp_path / "failing.py"
    failing.write_text("import sys; sys.exit(42)")
    ended(failing)
    assert outcome() == ("failed", 42, False), "it failed before it made progress"
    ended("--no-such-option", failing)
    assert outcome() == ("refused", 2, False)
    ended("--nnodes", "2:1", failing)
    assert outcome() == ("refused", 2, False)
    running = cleanup(standalone(tmp_path, TINY_JOB, tmp_path, 100_000, 0.05, slots=1, options=("--verdict", verdict)))
    running.wait_for("generation 1, .* starts")
    assert outcome() == ("running", None, True)
    running.process.kill()
    running.wait()
    assert outcome() == ("running", None, True), "nobody could say that it was killed"
