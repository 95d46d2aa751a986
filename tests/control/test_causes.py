"""What kind of error ends a worker: told by types and places, never by words."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import etc_agent
from etc_agent.control import causes
from etc_agent.control.causes import ErrorKind, kind_in_text, kind_of
from etc_agent.errors import ConfigRefusedError, PeerLostError, RelayedError
from tests.forkserver import context


def raised_by(work: Callable[[], object]) -> tuple[ErrorKind, ErrorKind]:
    """The kind of what `work` raises: of the exception, and of its text."""
    try:
        work()
    except BaseException as error:
        return kind_of(error), kind_in_text(traceback.format_exc())
    raise AssertionError("it did not raise")


def reset() -> None:
    raise ConnectionResetError("gloo: socket: connection reset by peer")


def spoken() -> None:
    raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")


def computed() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


def in_a_module() -> None:
    torch.nn.Linear(3, 3)(torch.ones(2, 2))


def relayed_by_a_loader() -> None:
    loader = torch.utils.data.DataLoader(Broken(), num_workers=1)
    next(iter(loader))


class Broken(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> None:
        reset()


def handled() -> None:
    """A script that looks for its data elsewhere, and fails there."""
    try:
        reset()
    except ConnectionError:
        {}["mirror"]


@pytest.mark.parametrize(
    "work", [reset, spoken, computed, in_a_module, relayed_by_a_loader, handled], ids=lambda work: work.__name__
)
def test_an_error_of_the_script_is_its_own_whatever_it_says(work: Callable[[], object]) -> None:
    assert raised_by(work) == (ErrorKind.RAISED, ErrorKind.RAISED)


def no_store() -> None:
    dist.TCPStore("127.0.0.1", 9, is_master=False, timeout=timedelta(seconds=0.2))


def in_a_handler() -> None:
    try:
        no_store()
    except RuntimeError:
        {}["a bug in the handler"]


def explained() -> None:
    try:
        no_store()
    except RuntimeError as error:
        raise ValueError("cannot meet the others") from error


@pytest.mark.parametrize("work", [no_store, in_a_handler, explained], ids=lambda work: work.__name__)
def test_what_follows_from_a_lost_peer_is_no_error_of_its_own(work: Callable[[], object]) -> None:
    assert raised_by(work) == (ErrorKind.PEER_LOST, ErrorKind.PEER_LOST)


def test_what_is_ours_says_itself_what_it_is() -> None:
    assert kind_of(ConfigRefusedError("4 heads")) is ErrorKind.MODEL
    assert kind_of(PeerLostError("the store is gone")) is ErrorKind.PEER_LOST
    assert kind_of(RelayedError("4 heads", ErrorKind.MODEL)) is ErrorKind.MODEL
    assert kind_of(SystemExit(3)) is ErrorKind.RAISED


def test_text_that_is_no_traceback_is_an_error_of_its_own() -> None:
    for text in ("", "socket", "Traceback (most recent call last):", 'Traceback\n  File "x", line 1'):
        assert kind_in_text(text) is ErrorKind.RAISED


# ---- a peer that is killed ------------------------------------------------------------------------------------------


def wait_by_hand() -> None:
    handle = dist.all_reduce(torch.ones(1), async_op=True)
    assert handle is not None
    handle.wait()


def reduce() -> None:
    dist.all_reduce(torch.ones(1))


def backward() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    first = model(torch.ones(1, 2)).sum()
    (Path(os.environ["PLACE"]) / "ready").touch()
    while not (Path(os.environ["PLACE"]) / "killed").exists():
        signal.sigtimedwait([], 0.01)
    first.backward()


WAYS = {way.__name__: way for way in (wait_by_hand, reduce, backward)}


def rank(number: int, way: str, place: str) -> None:
    os.environ["PLACE"] = place
    store = dist.FileStore(f"{place}/store", 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1))
    if number == 1:
        if way == "backward":
            DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2))
            while not Path(f"{place}/ready").exists():
                signal.sigtimedwait([], 0.01)
        Path(f"{place}/killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    Path(f"{place}/kinds").write_text(" ".join(raised_by(WAYS[way])))


@pytest.mark.parametrize(
    ("way", "kind"),
    [("wait_by_hand", ErrorKind.PEER_LOST), ("reduce", ErrorKind.PEER_LOST), ("backward", ErrorKind.UNCLEAR)],
)
def test_a_killed_peer_is_told_from_an_error_of_ones_own(way: str, kind: ErrorKind, tmp_path: Path) -> None:
    processes = [context.Process(target=rank, args=(number, way, str(tmp_path)), daemon=True) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "kinds").read_text() == f"{kind} {kind}"


@pytest.mark.parametrize("part", [*causes._ONLY_WAITS, *causes._ALSO_WAITS])
def test_every_place_that_counts_exists(part: str) -> None:
    """A file that is renamed would be judged as any other."""
    for package in (Path(etc_agent.__file__), Path(torch.__file__)):
        if (package.parents[1] / part.strip("/")).exists():
            return
    raise AssertionError(f"{part} is neither ours nor torch's")
