"""Contexts: named etcds in a small file."""

from __future__ import annotations

from pathlib import Path

import pytest

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from tests.launcher.ctl.conftest import Ctl, ctl_bare, put_job


@pytest.fixture
def file(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "contexts.yaml"
    path.write_text(
        f"current: lab\ncontexts:\n  lab: {{endpoints: ['{endpoint}'], run_id: demo}}\n"
        f"  other: {{endpoints: ['{endpoint}'], prefix: /other}}\n"
        "  away: {endpoints: ['127.0.0.1:1'], timeout_s: 0.2, user: ada, password_file: secret}\n"
    )
    (tmp_path / "secret").write_text("x\n")
    monkeypatch.setenv("ETC_CONTEXTS", str(path))
    return path


def test_the_current_context_says_which_etcd_and_which_job(file: Path, client: EtcdClient, keys: JobKeys) -> None:
    put_job(client, JobKeys("demo2"))
    assert ctl_bare("status", "-o", "json").json["run_id"] == "demo"
    assert ctl_bare("status", "--run-id", "demo2", "-o", "json").json["run_id"] == "demo2"


def test_a_named_context_counts_before_the_current_one(
    file: Path, client: EtcdClient, keys: JobKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_job(client, JobKeys("theirs", "/other"))
    assert [row["run_id"] for row in ctl_bare("list", "-o", "json", "--context", "other").lines] == ["theirs"]
    monkeypatch.setenv("ETC_CONTEXT", "other")
    assert ctl_bare("status", "-o", "json").json["run_id"] == "theirs"
    assert ctl_bare("list", "--context", "away").code == 7


def test_what_is_typed_counts_before_any_context(
    file: Path, ctl: Ctl, endpoint: str, client: EtcdClient, keys: JobKeys
) -> None:
    assert ctl_bare("list", "-o", "json", "--context", "other", "--etcd-prefix", "/etc-run").json["run_id"] == "demo"
    file.write_text("current: away\ncontexts: {away: {endpoints: ['127.0.0.1:1'], user: ada}}\n")
    assert ctl("status", run_id=None).code == 0, "an etcd that is typed has nothing of the current context"


def test_contexts_are_listed_and_the_current_one_is_marked(file: Path, endpoint: str) -> None:
    rows = ctl_bare("contexts", "-o", "json").lines
    assert [(row["name"], row["current"]) for row in rows] == [("lab", True), ("other", False), ("away", False)]
    assert "* lab" in " ".join(ctl_bare("contexts").out.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("contexts: {lab: {endpoint: x}}", "contexts.lab.endpoint: unknown field; did you mean endpoints?"),
        ("contexts: {lab: {endpoints: []}}", "contexts.lab.endpoints: must not be empty"),
        ("current: prod", "current: no context prod in"),
        ("contexts: [", "not YAML"),
        ("contexts: {lab: {endpoints: [x], timeout_s: 0}}", "contexts.lab.timeout_s: expected more than 0, got 0"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    ended = ctl_bare("list")
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
