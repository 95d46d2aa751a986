"""Where the logs of spares are found once they are workers, job after job of one name."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from etc_agent.agent.processes.logs import NodeLogs
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot

SLOT = Slot("a", 1)
SECOND = Generation(2, ParallelConfig(dp=2), (Slot("a", 0), SLOT), "a:1", previous=1)


def logs(tmp_path: Path) -> NodeLogs:
    return NodeLogs(DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL), tmp_path / "job", 2)


def spare_writes(node: NodeLogs, text: str) -> None:
    specs, folder = node.of_spare(SLOT)
    Path(specs.reify({0: {}}).stdouts[0]).write_text(text)
    node.adopt(folder, SLOT, SECOND)


def worker_writes(node: NodeLogs, text: str) -> None:
    Path(node.of(SLOT, SECOND, {}).reify({0: {}}).stdouts[0]).write_text(text)


def test_the_log_of_the_last_job_of_a_name_is_found_whether_its_worker_was_a_spare_or_not(tmp_path: Path) -> None:
    for text, write in enumerate((worker_writes, spare_writes, spare_writes, worker_writes, spare_writes)):
        write(logs(tmp_path), str(text))
        assert (tmp_path / "job" / "generation_2" / "a" / "1" / "stdout.log").read_text() == str(text)


def test_nobody_else_can_enter_the_folder_of_a_run(tmp_path: Path) -> None:
    worker_writes(logs(tmp_path), "secret")
    assert (tmp_path / "job").stat().st_mode & 0o077 == 0


def test_where_no_log_can_be_written_a_worker_writes_to_the_console(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "job").write_text("in the way")
    destinations = logs(tmp_path).of(SLOT, SECOND, {}).reify({0: {}})
    assert destinations.stdouts == {0: ""}
    assert f"no logs can be written to {tmp_path}/job/generation_2/a/1" in caplog.text
    specs, folder = logs(tmp_path).of_spare(SLOT)
    assert (specs.reify({0: {}}).stderrs, folder) == ({0: ""}, None)


def test_a_spare_shares_no_file_with_a_worker_of_an_earlier_job(tmp_path: Path) -> None:
    spare_writes(logs(tmp_path), "earlier")
    node = logs(tmp_path)
    specs, _ = node.of_spare(SLOT)
    spare = Path(specs.reify({0: {}}).stdouts[0])
    spare.write_text("spare")
    worker_writes(node, "worker")
    assert spare.read_text() == "spare"
