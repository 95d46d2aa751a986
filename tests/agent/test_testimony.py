"""What the guardian says in etcd about an agent that was killed, and when it says nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import wait_until

from etc_agent.agent.etcd import connect
from etc_agent.agent.safety import testimony
from etc_agent.agent.safety.testimony import Case
from etc_agent.agent.settings import EtcdSettings
from etc_agent.reconfig.known.records import NodeRecord
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.values import Event
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.listen import OnPort
from etc_agent.rendezvous.private.server import EtcdServer
from tests.rendezvous.etcd_helpers import make_certificates, run_etcdctl

AGENT = """
import json, os, subprocess, sys, time
from pathlib import Path
from etc_agent.agent.safety.guardian import Guardian
case = json.loads(sys.stdin.readline())
guardian = Guardian()
guardian.testify(case, case["limit_s"])
guardian.remove_folder(Path(sys.argv[2]))
with guardian.starting():
    worker = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env={**os.environ, "ETC_CONTROL_SOCKET": f"{sys.argv[2]}/control.sock"},
    )
    if sys.argv[1] == "starting":
        print(guardian.pid, worker.pid, flush=True)
        time.sleep(600)
    guardian.watch_group(worker.pid)
print(guardian.pid, worker.pid, worker.stdout.readline().decode().strip(), flush=True)
time.sleep(600)
"""
KEPT = 600


@dataclass(frozen=True)
class Agent:
    process: subprocess.Popen[str]
    guardian: int
    workers: list[int]


@contextmanager
def agent_of(case: Case, how: str = "normal") -> Iterator[Agent]:
    command = [sys.executable, "-c", AGENT, how, f"{tempfile.gettempdir()}/none-{uuid.uuid4().hex}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(case.to_json()) + "\n")
        process.stdin.flush()
        guardian, *workers = map(int, process.stdout.readline().split())
        try:
            yield Agent(process, guardian, workers)
        finally:
            process.kill()
            for pid in workers:
                subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)


def said_by(agent: Agent) -> str:
    """What the agent, its guardian and the program that testifies have written, once all of them have ended."""
    assert agent.process.stderr is not None
    return agent.process.stderr.read()


def case_of(settings: EtcdSettings, keys: JobKeys, limit_s: float = 30.0) -> Case:
    return Case(settings, keys.run_id, "a", "first life", limit_s, 2.0)


def register(client: EtcdClient, keys: JobKeys, instance: str = "first life") -> int:
    """What an agent that leads has in etcd."""
    lease = client.grant_lease(600)
    record = NodeRecord("a", "127.0.0.1", 1, 1, instance)
    client.put(keys.node("a"), json.dumps(record.to_json()), lease)
    client.put(keys.leader, "a", lease)
    return lease


def are_running(pids: list[int]) -> bool:
    def is_running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return any(map(is_running, pids))


@pytest.fixture
def settings(shared_etcd: EtcdServer) -> EtcdSettings:
    return EtcdSettings((shared_etcd.endpoint,))


def test_when_all_workers_of_a_killed_agent_have_ended_its_record_and_the_lead_go_in_one_revision(
    client: EtcdClient, keys: JobKeys, settings: EtcdSettings
) -> None:
    lease, seen = register(client, keys), list[tuple[list[str], bool]]()
    with agent_of(case_of(settings, keys)) as agent:

        def see(events: list[Event], _: int) -> None:
            seen.append((sorted(event.kv.key for event in events), are_running(agent.workers)))

        _, revision = client.get_prefix(keys.root)
        watch = client.watch_prefix(keys.root, revision + 1, see, lambda: 0)  # type: ignore[arg-type]
        agent.process.kill()
        wait_until(lambda: seen, "the testimony")
        assert seen[0] == (sorted([keys.gone("a"), keys.leader, keys.node("a")]), False)
        assert client.get(keys.gone("a")).json() == {"instance": "first life"}  # type: ignore[union-attr]
        wait_until(lambda: client.lease_time_to_live(lease) is None, "the end of the lease")
        assert "the agent of a is gone; its workers have ended, and the other nodes know" in said_by(agent)
        watch.cancel()


def test_a_worker_that_an_agent_was_just_starting_is_killed_and_nothing_is_said(
    client: EtcdClient, keys: JobKeys, settings: EtcdSettings
) -> None:
    register(client, keys)
    with agent_of(case_of(settings, keys), "starting") as agent:
        agent.process.kill()
        wait_until(lambda: not are_running(agent.workers), "the end of the worker")
        assert said_by(agent) == ""
        assert client.get(keys.gone("a")) is None
        assert client.get(keys.node("a")) is not None


def test_nothing_is_said_when_the_guardian_dies_with_its_agent(
    client: EtcdClient, keys: JobKeys, settings: EtcdSettings
) -> None:
    register(client, keys)
    with agent_of(case_of(settings, keys)) as agent:
        subprocess.run(["kill", "-9", str(agent.guardian), str(agent.process.pid)], check=True)
        assert said_by(agent) == ""
        assert client.get(keys.gone("a")) is None


def test_what_is_said_comes_when_etcd_answers_again(keys: JobKeys) -> None:
    with EtcdServer() as server, EtcdClient([server.endpoint]) as client:
        register(client, keys)
        with agent_of(case_of(EtcdSettings((server.endpoint,)), keys)) as agent:
            server.kill()
            agent.process.kill()
            wait_until(lambda: not are_running(agent.workers), "the end of the workers")
            server.start_again()
            wait_until(lambda: client.get(keys.gone("a")), "the testimony")
            assert client.get(keys.node("a")) is None


def test_where_etcd_does_not_answer_in_time_the_lease_has_to_run_out(keys: JobKeys) -> None:
    with EtcdServer() as server, agent_of(case_of(EtcdSettings((server.endpoint,)), keys, limit_s=0.5)) as agent:
        server.kill()
        agent.process.kill()
        assert "etcd has not heard of it, so the other nodes wait for its lease" in said_by(agent)


def test_a_later_agent_of_the_same_name_keeps_its_record(
    client: EtcdClient, keys: JobKeys, settings: EtcdSettings
) -> None:
    register(client, keys, "second life")
    testimony.testify(client, keys, "a", "first life", time.monotonic())
    assert client.get(keys.node("a")) is not None
    assert client.get(keys.leader) is not None
    assert client.get(keys.gone("a")) is None


def test_an_instance_whose_lease_is_over_is_testified_for_and_the_lead_of_another_stays(
    client: EtcdClient, keys: JobKeys
) -> None:
    client.put(keys.leader, "b", client.grant_lease(600))
    testimony.testify(client, keys, "a", "first life", time.monotonic())
    kept = client.get(keys.gone("a"))
    assert kept is not None
    assert kept.json() == {"instance": "first life"}
    assert (client.lease_time_to_live(kept.lease) or 0) <= KEPT
    assert client.get(keys.leader) is not None


def test_tls_and_a_password_reach_the_program_that_testifies_and_are_on_no_command_line(
    tmp_path: Path, keys: JobKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_tls, client_tls = make_certificates(tmp_path)
    with EtcdServer(listen=OnPort(tls=server_tls)) as server, ExitStack() as stack:
        etcdctl = [
            *("etcdctl", f"--endpoints=https://{server.endpoint}", f"--cacert={client_tls.ca}"),
            *(f"--cert={client_tls.certificate}", f"--key={client_tls.key}"),
        ]
        for command in ("user add root:secret", "user grant-role root root", "role add trainer", "user add bob:w0rd",
                        f"role grant-permission --prefix trainer readwrite {keys.root}", "user grant-role bob trainer",
                        "auth enable"):  # fmt: skip
            run_etcdctl([*etcdctl, *command.split()])
        monkeypatch.chdir(tmp_path)
        files = [Path(path.name) for path in (client_tls.ca, client_tls.certificate, client_tls.key) if path]
        settings = EtcdSettings((server.endpoint,), "/etc-run", *files, "bob", "w0rd")
        client = stack.enter_context(connect(settings, 5.0))
        register(client, keys)
        agent = stack.enter_context(agent_of(case_of(settings, keys)))
        monkeypatch.chdir("/")
        agent.process.kill()
        shown = set[bytes]()

        def is_said() -> bool:
            shown.update(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _children_of(agent.guardian))
            return client.get(keys.gone("a")) is not None

        wait_until(is_said, "the testimony")
        assert any(b"testimony" in line for line in shown)
        assert not any(b"w0rd" in line for line in shown)
        assert "w0rd" not in said_by(agent)


def _children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
