"""The etcd roles that `etc-ctl role` prints, against a real etcd with TLS and passwords, and a real job under them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from running import TINY_JOB, EtcRun, wait_for_step

from etc_agent.rendezvous.etcd.client import EtcdClient, Tls
from etc_agent.rendezvous.etcd.errors import EtcdAuthError
from etc_agent.rendezvous.etcd.values import Put
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.listen import OnPort
from etc_agent.rendezvous.private.server import EtcdServer
from launcher.ctl.main import run
from tests.rendezvous.etcd_helpers import make_certificates

PASSWORD = "word"


@dataclass(frozen=True, slots=True)
class Guarded:
    """An etcd that takes only TLS and users: one for each audience of a job, and the agent of another job."""

    endpoint: str
    tls: Tls

    def client(self, user: str) -> EtcdClient:
        return EtcdClient([self.endpoint], tls=self.tls, user=user, password=PASSWORD, timeout_s=3.0)

    def options(self, user: str) -> list[str]:
        return [
            "--etcd-endpoints", f"https://{self.endpoint}", "--etcd-user", user, "--etcd-ca-file", str(self.tls.ca),
            "--etcd-cert-file", str(self.tls.certificate), "--etcd-key-file", str(self.tls.key),
        ]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    server_tls, client_tls = make_certificates(tmp_path_factory.mktemp("pki"))
    with EtcdServer(listen=OnPort(tls=server_tls)) as server:
        guarded = Guarded(server.endpoint, client_tls)
        etcdctl = [
            "etcdctl", f"--endpoints=https://{server.endpoint}", f"--cacert={client_tls.ca}",
            f"--cert={client_tls.certificate}", f"--key={client_tls.key}",
        ]

        def call(*words: str) -> None:
            environment = {"ETCDCTL_API": "3", "PATH": os.environ["PATH"]}
            subprocess.run([*etcdctl, *words], env=environment, check=True, capture_output=True, timeout=20)

        for run_id in ("job", "other"):
            for line in printed_roles(run_id):
                call(*shlex.split(line)[1:])
        call("role", "add", "root")
        for user, role in (
            ("root", "root"), ("node", "etc-run.etc-run.job.agent"), ("ada", "etc-run.etc-run.job.admin"),
            ("eve", "etc-run.etc-run.job.viewer"), ("stranger", "etc-run.etc-run.other.agent"),
        ):
            call("user", "add", f"{user}:{PASSWORD}")
            call("user", "grant-role", user, role)
        call("auth", "enable")
        yield guarded


def printed_roles(run_id: str) -> list[str]:
    """What `etc-ctl role` prints."""
    command = [sys.executable, "-m", "launcher.ctl", "role", "--run-id", run_id, "--print"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_job_runs_under_its_own_role_and_is_changed_and_stopped_under_the_administrators(
    etcd: Guarded, tmp_path: Path, cleanup: Callable[[EtcRun], EtcRun], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("ETC_PASSWORD", PASSWORD)
    job = cleanup(EtcRun(
        "--nnodes", "1", "--nproc-per-node", 2, "--rdzv-id", "job", "--parallel", "DP1", "--local-addr", "127.0.0.1",
        "--port-range", "28500-28599", *etcd.options("node"), TINY_JOB, tmp_path, 100_000, 0.02, "{}",
        cwd=tmp_path, environment={"ETC_PASSWORD": PASSWORD},
    ))
    wait_for_step(tmp_path, 2)
    admin, viewer = etcd.options("ada"), etcd.options("eve")
    assert run(["scale", "2", "--wait", "--run-id", "job", *admin]) == 0
    assert run(["cordon", "127.0.0.1/1", "--run-id", "job", *admin]) == 0
    assert run(["uncordon", "127.0.0.1/1", "--run-id", "job", *admin]) == 0
    assert run(["explain", "--run-id", "job", *viewer]) == 0
    assert run(["scale", "1", "--run-id", "job", *viewer]) == 1
    with etcd.client("eve") as client:
        nodes, _ = client.get_prefix(JobKeys("job").nodes_prefix)
    assert nodes[0].json()["store_port"] in range(28500, 28600)
    assert nodes[0].json()["contact_port"] in range(28500, 28600)
    capsys.readouterr()
    assert run(["status", *viewer]) == 1
    assert "--run-id: name the job; this user may not look for it" in capsys.readouterr().err
    assert run(["stop", "--wait", "--run-id", "job", *admin]) == 0
    assert job.wait() == 143
    job.assert_nothing_left()


@pytest.mark.parametrize(
    ("user", "key", "is_allowed"),
    [
        ("node", "current", True),
        ("node", "control/scale", True),
        ("node", "control/reply", True),
        ("node", "control/cordon/a", True),
        ("node", "status", True),
        ("ada", "control/scale", True),
        ("ada", "control/drain/a", True),
        ("ada", "control/cordon/a/3", True),
        ("ada", "control/pause", True),
        ("ada", "control/stop", True),
        ("ada", "control/reply", False),
        ("ada", "current", False),
        ("ada", "nodes/a", False),
        ("eve", "control/scale", False),
        ("stranger", "current", False),
        ("stranger", "control/scale", False),
    ],
)
def test_each_role_writes_what_it_must_and_nothing_else(
    etcd: Guarded, user: str, key: str, is_allowed: bool
) -> None:
    with etcd.client(user) as client:
        if is_allowed:
            client.transact([], [Put(JobKeys("job").root + key, "x")])
            return
        with pytest.raises(EtcdAuthError, match="does not let user"):
            client.transact([], [Put(JobKeys("job").root + key, "x")])


def test_another_jobs_agent_reads_nothing_of_this_job(etcd: Guarded) -> None:
    with etcd.client("stranger") as client:
        for prefix in (JobKeys("job").root, "/etc-run/"):
            with pytest.raises(EtcdAuthError):
                client.get_prefix(prefix)
        assert client.get_prefix(JobKeys("other").root)[0] == []


def test_another_jobs_agent_cannot_join_this_job(
    etcd: Guarded, tmp_path: Path, cleanup: Callable[[EtcRun], EtcRun]
) -> None:
    intruder = cleanup(EtcRun(
        "--nnodes", "1", "--nproc-per-node", 1, "--rdzv-id", "job", *etcd.options("stranger"),
        TINY_JOB, tmp_path, 10, 0.02, "{}", cwd=tmp_path, environment={"ETC_PASSWORD": PASSWORD},
    ))
    assert intruder.wait() == 1
    assert "etcd does not let user 'stranger' do this" in intruder.output
