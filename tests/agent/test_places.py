"""Folders for sockets, wherever TMPDIR points."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etc_agent.errors import EtcError
from etc_agent.places import MAX_SOCKET_PATH_BYTES, private_folder, socket_folder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    """TMPDIR, of as many bytes as the test asks for."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name) / ("x" * (request.param - len(name) - 1))
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        yield folder


@pytest.mark.parametrize("temporary", [77, 78, 110], indirect=True)
def test_a_socket_fits_into_its_folder_however_long_tmpdir_is(temporary: Path) -> None:
    folder = socket_folder("etc-run-")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control.sock"))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder.parent == temporary) == (len(str(temporary / folder.name / "control.sock")) <= MAX_SOCKET_PATH_BYTES)
    (folder / "control.sock").unlink()
    folder.rmdir()


def test_where_there_is_no_place_one_line_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etc_agent.places._temporary_folders", lambda: iter(["/nowhere", "/proc"]))
    with pytest.raises(EtcError, match=r"/nowhere, /proc cannot be written.*set TMPDIR") as caught:
        socket_folder("etc-run-")
    assert "\n" not in str(caught.value)


def test_where_tmpdir_is_a_dot_paths_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", ".")
    assert private_folder("etc-run-").parent == tmp_path
    monkeypatch.setattr("etc_agent.places.MAX_SOCKET_PATH_BYTES", 1000)
    assert socket_folder("etc-run-").parent == tmp_path
