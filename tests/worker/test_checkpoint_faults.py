"""Checkpoints that fail, that meet a change of size, and that cannot be read: training goes on in each case."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from mini_agent import MiniAgent, run_script
from test_checkpoints import train

from etc_agent.worker.checkpoints.folder import check, is_complete, newest_first


def wait_for_checkpoint(agent: MiniAgent, folder: Path, step: int) -> Path:
    """The newest complete one, once there is one of that step or a later one."""

    def newest() -> Path | None:
        return next((path for path in newest_first(folder) if is_complete(path) and check(path).step >= step), None)

    agent.wait_for(lambda: newest() is not None, f"a checkpoint of step {step}")
    path = newest()
    assert path is not None
    return path


def test_a_folder_that_cannot_be_written_is_a_warning_and_the_next_checkpoint_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.write_text("a file is here")
    fault = {"checkpoint": {"folder": str(folder), "every_steps": 10}}
    with MiniAgent(tmp_path, fault=fault, verify=False) as agent:
        agent.start("PP1TP1DP2")
        agent.wait_for(lambda: "was not written, and training goes on: " in agent.logs(), "a warning")
        assert re.search(r"the checkpoint of step \d+ was not written, .*saved: (File exists|Not a dir)", agent.logs())
        folder.unlink()
        wait_for_checkpoint(agent, folder, 10)
        agent.last_step_in(20)
        assert set(agent.finish().values()) == {0}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_for_one_rank_is_a_warning_and_the_next_checkpoint_is_written(
    tmp_path: Path, rank: int
) -> None:
    folder = tmp_path / "saved"
    fault = {"checkpoint": {"folder": str(folder), "every_steps": 10}, "full_disk": rank}
    with MiniAgent(tmp_path, fault=fault, verify=False) as agent:
        agent.start("PP2TP1DP1")
        path = wait_for_checkpoint(agent, folder, 20)
        assert "was not written, and training goes on" in agent.logs()
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in agent.logs()
        assert check(path).config == "PP2TP1DP1"
        agent.last_step_in(20)
        assert set(agent.finish().values()) == {0}
    assert all(is_complete(path) for path in newest_first(folder))


def test_an_extra_that_cannot_be_read_on_one_rank_is_a_warning_and_no_rank_waits_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    fault = {"checkpoint": {"folder": str(folder), "every_steps": 10}, "unreadable": ["own", 1]}
    with MiniAgent(tmp_path, fault=fault, verify=False) as agent:
        (tmp_path / "unreadable").touch()
        agent.start("PP1TP1DP2")
        agent.wait_for(lambda: "the state of own is not at hand" in agent.logs(), "a warning")
        (tmp_path / "unreadable").unlink()
        assert check(wait_for_checkpoint(agent, folder, 20)).config == "PP1TP1DP2"
        agent.last_step_in(20)
        assert set(agent.finish().values()) == {0}


@pytest.mark.long
def test_a_change_of_size_neither_waits_for_a_checkpoint_nor_tears_it(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    fault = {"checkpoint": {"folder": str(folder), "every_steps": 10, "keep": 100}, "slow_flush_s": 0.7}
    with MiniAgent(tmp_path, fault=fault, verify=False) as agent:
        agent.start("PP1TP1DP4")
        for config in ("PP1TP1DP2", "PP2TP1DP2"):
            agent.wait_for(lambda: any(folder.glob(".step-*")), "a checkpoint that is being written")
            begin = time.monotonic()
            switched = agent.change(config)
            assert all(sum(each.phases_ms.values()) < 700 for each in switched.values()), "it waited for a flush"
            assert time.monotonic() - begin < 20
            # Whichever is the newest complete one, every checkpoint with a final name is complete.
            assert all(is_complete(path) for path in newest_first(folder))
            step = agent.steps()[-1]["step"]
            assert check(wait_for_checkpoint(agent, folder, step)).config == config
        agent.last_step_in(20)
        assert set(agent.finish().values()) == {0}


ALONE = """
import threading
import torch.distributed as dist
from etc_agent.worker.checkpoints.group import Meeting, SavingGroup
from etc_agent.worker.world.swap import install

install()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = SavingGroup(Meeting(f"127.0.0.1:{store.port}", "test", RANK, 2, 600.0), 1)
errors = []

def run():
    try:
        group.run(lambda: print("met"))
    except RuntimeError as error:
        errors.append(error)

thread = threading.Thread(target=run)
thread.start()
while thread.is_alive():
    thread.join(0.2)
    group.cut()
print("errors", len(errors))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_peers_never_come_is_freed_when_its_checkpoint_is_abandoned(tmp_path: Path, rank: int) -> None:
    code, said = run_script(ALONE.replace("RANK", str(rank)), tmp_path / "log", {})
    assert code == 0, said
    assert "met" not in said
    assert "errors 1" in said


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 3 and 6."""
    place = tmp_path_factory.mktemp("two")
    train("tiny", "PP1TP1DP2", place / "saved", place / "dumps", num_steps=3, every=3)
    train("tiny", "PP1TP1DP2", place / "saved", place / "dumps", num_steps=6, every=3)
    return place / "saved"


def test_a_checkpoint_whose_data_cannot_be_read_is_left_out_and_the_one_before_is_loaded(
    two_checkpoints: Path, tmp_path: Path
) -> None:
    newest = newest_first(two_checkpoints)[0]
    kept = {}
    for file in newest.glob("*.distcp"):
        kept[file] = file.read_bytes()
        file.write_bytes(bytes(len(kept[file])))  # of the same size
    assert is_complete(newest)
    said = train("tiny", "PP1TP1DP1", two_checkpoints, tmp_path / "dumps", num_steps=4)
    assert "checkpoint step-6 cannot be read, and the one before it is taken" in said
    assert "continuing from checkpoint of step 3" in said
    for file, content in kept.items():
        file.write_bytes(content)


def test_a_checkpoint_of_another_model_is_an_error_that_names_a_tensor(two_checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"is float32 \(.*\) in the checkpoint, and build\(\) makes it float32"):
        train("wide", "PP1TP1DP1", two_checkpoints, tmp_path / "dumps", num_steps=4)
    assert [check(path).step for path in newest_first(two_checkpoints)] == [6, 3]
