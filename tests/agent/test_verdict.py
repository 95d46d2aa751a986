"""The verdict file, and what a verdict says about starting again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from etc_agent.agent.ending import Ending, Facts, end_of
from etc_agent.agent.job_end import JobEnd
from etc_agent.agent.settings import Timeouts
from etc_agent.agent.telemetry.verdict import RUNNING, Verdict, begin, running, write
from etc_agent.control.checkpoint_settings import newest_step
from etc_agent.errors import EtcError
from etc_agent.reconfig.known.records import Current, Outcome
from launcher.options import parse_command_line, typed_before_script
from launcher.telemetry import verdict_file, verdict_of

TRAINING = Facts(Current(committed=1), is_member=True)


def ended(outcome: Outcome, exit_code: int) -> Current:
    return Current(committed=1, outcome=outcome, exit_code=exit_code, why="the reason")


FAILED = replace(TRAINING, current=ended(Outcome.FAILED, 42))
STOPPED = replace(TRAINING, current=ended(Outcome.STOPPED, 143))
TOLD = replace(TRAINING, is_told_to_leave=True, is_member=False)


@pytest.mark.parametrize(
    ("facts", "ending", "start_again"),
    [
        (replace(TRAINING, current=ended(Outcome.SUCCEEDED, 0)), Ending.SUCCEEDED, False),
        (replace(FAILED, has_progressed=True), Ending.FAILED, True),
        (FAILED, Ending.FAILED, False),
        (replace(FAILED, is_below_min=True, is_leader=True), Ending.FAILED, True),
        (replace(STOPPED, signals=(signal.SIGTERM,)), Ending.STOPPED, True),
        (replace(STOPPED, signals=(signal.SIGINT,)), Ending.STOPPED, False),
        (replace(STOPPED, is_stop_ordered=True), Ending.STOPPED, False),
        (STOPPED, Ending.STOPPED, True),
        (replace(TRAINING, is_stopping=True, signals=(signal.SIGTERM, signal.SIGTERM)), Ending.STOPPED, True),
        (replace(TRAINING, is_stopping=True, signals=(signal.SIGINT, signal.SIGINT)), Ending.STOPPED, False),
        (replace(TRAINING, is_stopping=True), Ending.FAILED, False),
        (replace(TRAINING, is_stopping=True, is_taken_away=True), Ending.FAILED, True),
        (replace(TRAINING, is_stopping=True, has_finished=True), Ending.SUCCEEDED, False),
        (TOLD, Ending.LEFT, False),
        (replace(TOLD, is_taken_away=True), Ending.LEFT, True),
        (replace(TRAINING, unheard_s=1e9), Ending.FAILED, True),
        (replace(TRAINING, unheard_s=1e9, has_finished=True), Ending.SUCCEEDED, False),
    ],
)
def test_what_was_taken_away_or_had_come_further_is_worth_another_start(
    facts: Facts, ending: Ending, start_again: bool
) -> None:
    end = end_of(facts, Timeouts())
    assert end is not None
    assert (end.ending, end.start_again) == (ending, start_again)


def test_the_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "verdict.json"
    begin(file, "job")
    with file.open() as before:
        write(file, Verdict.refused("job", EtcError("no etcd"), 1, start_again=True))
        assert json.load(before)["outcome"] == RUNNING, "who has opened the old one reads it to its end"
    found = json.loads(file.read_text())
    assert (found["outcome"], found["exit_code"], found["why"]) == ("refused", 1, "no etcd")
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_the_step_of_the_newest_checkpoint_is_the_one_to_go_on_from(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", ".step-11.gen3", "step-x"):
        (tmp_path / name).mkdir()
    assert newest_step(str(tmp_path)) == 10
    assert newest_step(str(tmp_path / "step-9")) is None
    assert newest_step(str(tmp_path / "missing")) is None
    end = JobEnd(143, "stopped", 15, ending=Ending.STOPPED, start_again=True, step=12)
    write(tmp_path / "verdict.json", Verdict.of("job", end, 10))
    found = json.loads((tmp_path / "verdict.json").read_text())
    assert (found["step"], found["checkpoint"], found["start_again"]) == (12, 10, True)


def test_a_device_is_written_to_and_not_replaced() -> None:
    write(Path("/dev/null"), running("job"))
    assert Path("/dev/null").is_char_device()


def test_a_file_that_a_container_engine_has_mounted_is_written_in_place(tmp_path: Path) -> None:
    mounted, host = tmp_path / "termination-log", tmp_path / "host"
    mounted.touch()
    host.touch()
    program = (
        "from pathlib import Path; from etc_agent.agent.telemetry.verdict import running, write; "
        f"write(Path({str(mounted)!r}), running('job'))"
    )
    script = f"mount --bind {host} {mounted} || exit 77; exec {sys.executable} -c \"{program}\""
    code = subprocess.run(["unshare", "--mount", "sh", "-c", script], timeout=60, check=False).returncode
    if code == 77 or code == 1:
        pytest.skip("this user may not mount anything")
    assert json.loads(host.read_text())["outcome"] == RUNNING


def test_a_file_that_cannot_be_written_refuses_the_start_and_spoils_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EtcError, match=r"--verdict: .* cannot be written: File exists"):
        begin(tmp_path / "file" / "verdict.json", "job")
    write(tmp_path / "file" / "verdict.json", running("job"))
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--no-such-option", "--verdict", "v", "train.py"], "v"),
        (["--standalone", "--verdict=v", "train.py"], "v"),
        (["--standalone", "train.py", "--verdict", "of-the-script"], None),
        (["--nnodes", "2", "train.py", "--verdict=of-the-script"], None),
        (["--verdict"], None),
    ],
)
def test_in_a_command_line_that_cannot_be_read_the_scripts_own_options_are_left_alone(
    words: list[str], found: str | None
) -> None:
    assert typed_before_script(words, "verdict") == found


def test_the_verdict_is_found_whatever_else_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = parse_command_line(["--config", "missing.yaml", "--verdict", "v", "x.py"])
    assert verdict_of(line) == tmp_path / "v"
    Path("job.yaml").write_text("{telemetry: {verdict: out/v}, command: no-such-file.py}")
    assert verdict_of(parse_command_line(["--config", "job.yaml"])) == tmp_path / "out" / "v"
    monkeypatch.setenv("ETC_VERDICT", "from-environment")
    assert verdict_file(["--bad"]) == tmp_path / "from-environment"
