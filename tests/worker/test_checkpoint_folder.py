"""What counts as a complete checkpoint, and what is deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from etc_agent.errors import EtcError
from etc_agent.worker.checkpoints.folder import (
    MARKER,
    METADATA,
    Marker,
    Progress,
    begin,
    check,
    discard,
    finish,
    is_complete,
    lost_since,
    newest_first,
    prune,
    read_progress,
    unfinished_path,
    write_progress,
)

VALUES = {"time": 1000.0, "config": "PP1TP1DP2", "stopped_s": 0.01, "written_s": 0.1}


def unfinished(folder: Path, step: int) -> Path:
    path = begin(folder, step, "gen1")
    (path / "__0_0.distcp").write_bytes(bytes(range(200)))
    (path / "__1_0.distcp").write_bytes(bytes(range(100)))
    (path / METADATA).write_bytes(b"metadata " * 20)
    return path


def complete(folder: Path, step: int) -> Path:
    return finish(unfinished(folder, step), step, VALUES)


def truncate(path: Path) -> None:
    with open(path / "__1_0.distcp", "r+b") as file:
        file.truncate(99)


def flip_metadata(path: Path) -> None:
    content = bytearray((path / METADATA).read_bytes())
    content[7] ^= 1
    (path / METADATA).write_bytes(content)


def change_marker(path: Path) -> None:
    text = (path / MARKER).read_text()
    (path / MARKER).write_text(text.replace('"step": 20', '"step": 21'))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is shorter": (truncate, "step-20/__1_0.distcp has 99 bytes and was written with 100"),
    "a file is missing": (lambda path: (path / "__0_0.distcp").unlink(), "step-20/__0_0.distcp is missing"),
    "the metadata is missing": (lambda path: (path / METADATA).unlink(), "step-20/.metadata is missing"),
    "a bit of the metadata": (flip_metadata, "step-20/.metadata has been changed"),
    "the marker is missing": (lambda path: (path / MARKER).unlink(), "step-20 has no etc-run.json"),
    "the marker is shorter": (lambda path: (path / MARKER).write_text("{"), "step-20/etc-run.json cannot be read"),
    "the marker is of something else": (lambda path: (path / MARKER).write_text("[1]"), "cannot be read"),
    "a digit of the marker": (change_marker, "step-20/etc-run.json has been changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_not_complete_and_the_reason_names_the_file(damage: str, tmp_path: Path) -> None:
    path = complete(tmp_path, 20)
    assert check(path).step == 20
    harm, reason = DAMAGES[damage]
    harm(path)
    with pytest.raises(EtcError, match=reason.replace(".", r"\.")):
        check(path)


def test_what_was_not_written_to_its_end_is_no_checkpoint_and_is_removed_by_the_next_one(tmp_path: Path) -> None:
    complete(tmp_path, 10)
    left = unfinished(tmp_path, 20)
    assert [path.name for path in newest_first(tmp_path)] == ["step-10"]
    complete(tmp_path, 30)
    assert not left.exists()
    assert [path.name for path in newest_first(tmp_path)] == ["step-30", "step-10"]


def test_only_unfinished_checkpoints_are_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished, mine = complete(tmp_path, 10), tmp_path / "mine"
    mine.mkdir()
    (mine / "work").write_text("of a year")
    left = unfinished(tmp_path, 20)
    monkeypatch.chdir(mine)
    for path in (left, finished, mine, Path(), Path(".."), tmp_path):
        discard(path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-10", "mine"}
    assert (mine / "work").exists()


def test_checkpoints_are_ordered_by_step_and_other_entries_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-final").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for step in (9, 100, 20):
        complete(tmp_path, step)
    assert [path.name for path in newest_first(tmp_path)] == ["step-100", "step-20", "step-9"]
    assert [path.name for path in prune(tmp_path, 1)] == ["step-20", "step-9"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-final", "notes.txt", "step-100"}


def test_pruning_counts_complete_checkpoints_alone(tmp_path: Path) -> None:
    paths = [complete(tmp_path, step) for step in (10, 20, 30, 40)]
    for broken in paths[2:]:
        truncate(broken)
    assert [path.name for path in prune(tmp_path, 1)] == ["step-10"]
    assert is_complete(paths[1]), "the newest complete one stays, whatever is newer and broken"


def test_a_step_that_is_written_again_replaces_the_one_before(tmp_path: Path) -> None:
    truncate(complete(tmp_path, 20))
    path = complete(tmp_path, 20)
    assert is_complete(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-20"]


def test_folders_that_others_have_made_are_neither_replaced_nor_deleted(tmp_path: Path) -> None:
    theirs = tmp_path / "step-20"
    theirs.mkdir()
    (theirs / "weights").write_text("of another program")
    with pytest.raises(EtcError, match="step-20 is there and is no checkpoint of etc-run"):
        complete(tmp_path, 20)
    complete(tmp_path, 30)
    complete(tmp_path, 40)
    assert [path.name for path in prune(tmp_path, 1)] == ["step-30"]
    assert (theirs / "weights").exists()


def test_an_unfinished_folder_is_named_after_its_generation(tmp_path: Path) -> None:
    assert unfinished_path(tmp_path, 20, "gen1") != unfinished_path(tmp_path, 20, "gen2")


def test_what_is_lost_is_told_in_steps_and_seconds(tmp_path: Path) -> None:
    marker = check(complete(tmp_path, 120))
    write_progress(tmp_path, Progress(128, 1003.2))
    assert lost_since(marker, read_progress(tmp_path)) == "8 steps and 3.2 s of training lost"
    assert lost_since(marker, Progress(121, 1001.0)) == "1 step and 1.0 s of training lost"
    assert lost_since(marker, Progress(120, 1001.0)) == "no step lost"
    (tmp_path / "progress.json").write_text(json.dumps({"step": "many"}))
    assert lost_since(marker, read_progress(tmp_path)) == "how much training was lost is not known"


def test_a_marker_says_what_it_was_given(tmp_path: Path) -> None:
    marker = check(complete(tmp_path, 20))
    assert marker == Marker(step=20, files=marker.files, metadata=marker.metadata, **VALUES)  # type: ignore[arg-type]
    assert marker.files == {"__0_0.distcp": 200, "__1_0.distcp": 100, METADATA: 180}
