"""What a worker without a session leaves behind: the error file that torch's @record writes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from etc_agent.agent.processes.error_file import read
from etc_agent.control.causes import ErrorKind


def own() -> None:
    raise ConnectionResetError("gloo: connection reset by peer")


def lost() -> None:
    dist.TCPStore("127.0.0.1", 9, is_master=False, timeout=timedelta(seconds=0.2))


@pytest.mark.parametrize(
    ("work", "text", "kind"),
    [
        (own, "ConnectionResetError: gloo: connection reset by peer", ErrorKind.RAISED),
        (lost, "DistNetworkError: ", ErrorKind.PEER_LOST),
    ],
    ids=["its own", "a lost peer"],
)
def test_the_kind_is_told_by_type_and_place(
    work: Callable[[], None], text: str, kind: ErrorKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises((ConnectionError, dist.DistError)):
        record(work)()
    raised = read(str(tmp_path / "error.json"))
    assert raised is not None
    assert raised.error.startswith(text)
    assert raised.kind is kind


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '"x"', '{"message": {}}', '{"message": null}', "[" * 100_000, '{"message": {"extraInfo": 3}}'],
)
def test_a_file_that_is_not_torchs_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(text)
    assert read(str(tmp_path / "error.json")) is None
    assert read(str(tmp_path / "none.json")) is None


def test_an_older_form_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text('{"message": "RuntimeError: socket\\nmore"}')
    raised = read(str(tmp_path / "error.json"))
    assert raised is not None
    assert (raised.error, raised.kind) == ("RuntimeError: socket", ErrorKind.RAISED)
