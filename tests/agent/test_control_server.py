"""Who may speak on the control socket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

from etc_agent.agent.control_server import ControlServer
from etc_agent.agent.peers import objection
from etc_agent.control.channel import Channel, Credentials
from etc_agent.control.messages import Hello, Message
from etc_agent.places import socket_folder
from tests.users import as_root, error_of_another_user

CHILD = """
import os, sys
from etc_agent.control.channel import Channel
from etc_agent.control.messages import Hello
channel = Channel.connect(sys.argv[1])
channel.send(Hello(local_rank=0, generation=1, pid=os.getpid(), in_session=False))
channel.receive()
"""
AGENT = """
import logging, sys
from pathlib import Path
from etc_agent.agent.control_server import ControlServer
logging.basicConfig(stream=sys.stdout, format="%(message)s")
server = ControlServer(Path(sys.argv[1]), lambda hello, channel, message: print("heard", message, flush=True))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def heard() -> Queue[Message | None]:
    return Queue()


@pytest.fixture
def server(heard: Queue[Message | None]) -> Iterator[ControlServer]:
    folder = socket_folder("etc-run-test-")
    server = ControlServer(folder, lambda hello, channel, message: heard.put(message))
    yield server
    server.close()
    server.path.unlink()
    folder.rmdir()


def test_a_process_that_this_one_started_is_heard(server: ControlServer, heard: Queue[Message | None]) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(server.path)]) as child:
        said = heard.get(timeout=20)
        assert isinstance(said, Hello)
        assert said.pid == child.pid
        server.close()


def test_a_process_of_the_same_user_that_nobody_of_this_job_started_is_not() -> None:
    folder = socket_folder("etc-run-test-")
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        channel = Channel.connect(str(folder / "control.sock"))  # this very process started the agent, not the reverse
        assert channel.receive() is None
        channel.close()
        agent.stdin.close()
        (said,) = agent.stdout.read().splitlines()
    expected = f"process {os.getpid()} may not use the control socket and was rejected: it is no worker of this"
    assert said.startswith(expected)
    (folder / "control.sock").unlink()
    folder.rmdir()


@as_root
def test_another_user_finds_no_way_in(server: ControlServer) -> None:
    assert error_of_another_user(lambda: Channel.connect(str(server.path)))
    server.path.parent.chmod(0o755)
    server.path.chmod(0o666)

    def speak() -> None:
        channel = Channel.connect(str(server.path))
        assert channel.receive() is None
        raise ConnectionAbortedError(1, "turned away")

    assert error_of_another_user(speak) == 1


def test_why_a_peer_is_turned_away() -> None:
    assert objection(Credentials(os.getpid(), os.getuid())) is None
    assert objection(Credentials(os.getpid(), os.getuid() + 1)) == (
        f"it runs as user {os.getuid() + 1}, this job as user {os.getuid()}"
    )
    for unseen in (0, 1, 1 << 22):
        assert objection(Credentials(unseen, os.getuid())) == "it is no worker of this job, nor was it started by one"


def test_a_worker_in_a_group_of_ours_is_known_though_its_parent_has_ended(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nif os.fork() == 0:\n    os.close(1)\n    time.sleep(60)\n"
        "print(os.getpid(), flush=True)\nos.close(1)\ntime.sleep(60)"
    )
    leader = subprocess.Popen(
        ["sh", "-c", f"({sys.executable} -c '{script}' & echo) ; sleep 60"], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )
    assert leader.stdout is not None
    leader.stdout.readline()
    pid = int(leader.stdout.readline())
    assert objection(Credentials(pid, os.getuid())) is None
    os.killpg(leader.pid, 9)
    leader.wait()
