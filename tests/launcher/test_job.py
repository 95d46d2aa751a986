"""The job file: what it accepts, and what it says about each mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from etc_agent.agent.settings import Timeouts
from etc_agent.control.redundancy import Redundancy, Scheme
from etc_agent.parallel.config import ParallelConfig
from launcher.job import Job, JobFileError, TimeoutsSection, load_job
from launcher.mistakes import named_fields, section_of


def written(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_a_full_job_file_is_read_into_typed_values(tmp_path: Path) -> None:
    job = load_job(written(tmp_path, """
        command: [train.py, --lr, 0.5, --steps, 100]
        nodes: {min: 1, max: 3}
        workers_per_node: 4
        parallel: {initial: pp2tp1dp1, allowed: [PP2, TP2DP2]}
        model: {layers: 4, heads: 4}
        global_batch: 32
        rendezvous: {run_id: a, endpoints: [127.0.0.1:2379], tls: {ca_file: ca.pem}, user: u, password_file: /x/p}
        timeouts: {lease_s: 5}
        logs: {redirects: 3, tee: "0:1,1:3"}
        env: {A: "1"}
    """))
    assert job.command == ["train.py", "--lr", "0.5", "--steps", "100"]
    assert job.parallel.initial == ParallelConfig(pp=2)
    assert job.parallel.allowed == [ParallelConfig(pp=2), ParallelConfig(tp=2, dp=2)]
    assert job.rendezvous.tls.ca_file == tmp_path / "ca.pem"
    assert job.rendezvous.password_file == Path("/x/p")
    assert job.timeouts.lease_s == 5
    assert (job.logs.redirects, job.logs.tee) == ("3", "0:1,1:3")


def test_a_command_may_be_one_line(tmp_path: Path) -> None:
    job = load_job(written(tmp_path, "command: train.py --name 'two words'"))
    assert job.command == ["train.py", "--name", "two words"]


def test_a_scheme_alone_is_short_for_redundancy(tmp_path: Path) -> None:
    assert load_job(written(tmp_path, "redundancy: peer")).redundancy.model_dump() == {"scheme": "peer", "every": 10}
    given = load_job(written(tmp_path, "redundancy: {scheme: peer, every: 3}")).redundancy
    assert Redundancy.parse(str(Redundancy(**given.model_dump()))) == Redundancy(Scheme.PEER, 3)
    assert load_job(written(tmp_path, "redundancy: parity")).redundancy.scheme is Scheme.PARITY
    assert load_job(written(tmp_path, "nodes: 2")).redundancy.scheme is Scheme.NONE


def test_one_number_of_nodes_is_both_bounds(tmp_path: Path) -> None:
    nodes = load_job(written(tmp_path, "nodes: 3")).nodes
    assert nodes is not None
    assert (nodes.min, nodes.max) == (3, 3)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("comand: x", "comand: unknown field; did you mean command?"),
        ("rendezvous: {endpont: []}", "rendezvous.endpont: unknown field; did you mean endpoints?"),
        ("timeouts: {zzz: 1}", "timeouts.zzz: unknown field; known: drain_s, end_s, etcd_s,"),
        ("nodes: {min: 3, max: 2}", "nodes: min 3 is above max 2"),
        ("nodes: {mim: 1}", "nodes.mim: unknown field; did you mean min?"),
        ("nodes: {min: one}", "nodes.min: expected an integer, got 'one'"),
        ("nodes: 0", "nodes: expected at least 1, got 0"),
        ("workers_per_node: four", "workers_per_node: expected a positive integer, or one of auto"),
        ("workers_per_node: true", "workers_per_node: expected a positive integer"),
        ("command: []", "command: must not be empty"),
        ("command: [a, true]", "command[1]: expected text, got True; quote it"),
        ("command: {a: b}", "command: write the command as one line, or as a list"),
        ("run_as: shell", "run_as: expected 'script', 'module' or 'program', got 'shell'"),
        ("parallel: {initial: PP2XP3}", "parallel.initial: 'PP2XP3' is not a parallel config"),
        ("parallel: {initial: 4}", "parallel.initial: 4 is not a parallel config"),
        ("parallel: {allowed: []}", "parallel.allowed: must not be empty"),
        ("parallel: {pack: sometimes}", "parallel.pack: expected true or false, got 'sometimes'"),
        ("global_batch: 1.5", "global_batch: expected an integer, got 1.5"),
        ("timeouts: {lease_s: -1}", "timeouts.lease_s: expected more than 0, got -1"),
        ("timeouts: {lease_s: .inf}", "timeouts.lease_s: "),
        ("timeouts: {lease_s: soon}", "timeouts.lease_s: expected a number, got 'soon'"),
        ("env: {A: 3}", "env.A: expected text, got 3; quote it"),
        ("env: {RANK: '3'}", "env: RANK: set by etc-run for every worker; leave out"),
        ("model: 5", "model: expected the fields heads, hidden, layers; got 5"),
        ("rendezvous: {endpoints: localhost}", "rendezvous.endpoints: expected a list, got 'localhost'"),
        ("rendezvous: {password: secret}", "rendezvous.password: unknown field; did you mean password_file?"),
        ("rendezvous: {tls: {cert_file: a}}", "rendezvous.tls: cert_file and key_file go together"),
        ("logs: {redirects: [3]}", "logs.redirects: expected 0 to 3"),
        ("redundancy: twice", "redundancy.scheme: expected none, peer or parity; got 'twice'"),
        ("redundancy: {scheme: peer, every: 0}", "redundancy.every: expected at least 1, got 0"),
        ("redundancy: {every: 5}", "redundancy.scheme: "),
        ("global_batch: 3\nglobal_batch: 4", "line 2, column 1: global_batch is given twice"),
        ("a: [", "line 1, column"),
        ("? [a, b]\n: c", "line 1, column"),
        ("train.py", "expected fields like 'command: train.py'"),
        ("", "expected fields like 'command: train.py'"),
    ],
)
def test_a_mistake_is_one_line_with_the_fields_path(tmp_path: Path, text: str, mistake: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(JobFileError) as caught:
        load_job(path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}: {mistake}")


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("parallel: {allowed: [PP2, PP4, PP2TP3DP1]}\nmodel: {heads: 4}",
         "parallel.allowed[2]: PP2TP3DP1: 4 heads cannot be divided over tp=3; choose tp from 1, 2, 4"),
        ("parallel: {initial: PP5}\nmodel: {layers: 4}",
         "parallel.initial: PP5TP1DP1: 4 layers cannot fill pp=5 stages; choose pp up to 4"),
        ("parallel: {initial: DP3}\nglobal_batch: 8",
         "parallel.initial: PP1TP1DP3: a global batch of 8 cannot be divided over dp=3; choose dp from 1, 2, 4, 8"),
        ("parallel: {initial: PP2, allowed: [TP2]}",
         "parallel.initial: PP2TP1DP1 is not among the allowed configs: PP1TP2DP1"),
    ],
)
def test_an_impossible_config_says_why_and_what_to_choose(tmp_path: Path, text: str, mistake: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(JobFileError) as caught:
        load_job(path)
    assert str(caught.value) == f"{path}: {mistake}"


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(JobFileError) as caught:
        load_job(written(tmp_path, "comand: x\nglobal_batch: y\nnodes: z"))
    assert len(str(caught.value).splitlines()) == 3


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"missing\.yaml: cannot be read: No such file"):
        load_job(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobFileError, match="is not UTF-8 text"):
        load_job(tmp_path / "binary.yaml")


def test_every_timeout_of_the_agent_can_be_set_in_the_file() -> None:
    assert set(TimeoutsSection.model_fields) == {field.name for field in dataclasses.fields(Timeouts)}


def test_an_empty_mapping_is_a_job_with_every_default() -> None:
    assert Job.model_validate({}).run_as == "script"


# ---- the job files that come with the project ----------------------------------------------------------------------

CONFIGS = Path(__file__).parents[2] / "configs"


def _leaves(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The path of every field that is not a section."""
    for name, field in named_fields(schema).items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name
        else:
            yield from _leaves(section, f"{prefix}{name}.")


def _given(value: object, prefix: str = "") -> Iterator[str]:
    assert isinstance(value, dict)
    for name, item in value.items():
        if isinstance(item, dict) and prefix + name != "env":
            yield from _given(item, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_the_example_is_valid_and_shows_every_field() -> None:
    path = CONFIGS / "example.yaml"
    load_job(path)
    assert set(_given(yaml.safe_load(path.read_text()))) == set(_leaves(Job))


def test_the_examples_timeouts_are_the_defaults() -> None:
    assert Timeouts(**load_job(CONFIGS / "example.yaml").timeouts.model_dump()) == Timeouts()


def test_the_demo_starts_on_two_of_four_slots() -> None:
    job = load_job(CONFIGS / "gpt-tiny.yaml")
    assert (job.workers_per_node, job.parallel.initial) == (4, ParallelConfig(pp=2))
