"""The guardian's own process, run as a script: see `etc_agent.agent.safety.guardian`.

It reads orders from standard input, one a line, until its agent is gone and so the pipe closes. It imports only what it
needs while it waits, and nothing of this project, so that it is small and starts quickly.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_LONGEST_S = 3600.0
_AGAIN_S = 0.02
"""How often groups are killed again, and looked for, until they have no members."""
_FOR_OTHERS = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)
"""Signals that a scheduler may send to every process of a job; only the agent has to act on them."""
_SOCKET = "ETC_CONTROL_SOCKET"
_NEWCOMERS_S = 2.0
"""For how long processes are looked for that the agent was starting when it died: they appear a moment later."""
_TESTIMONY = "etc_agent.agent.safety.testimony"
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


@dataclass(slots=True)
class Orders:
    """What the agent has told its guardian so far.

    `groups`: process groups to kill. `folders`: to remove at the end. `until`: when the groups are killed, in
    time.monotonic() seconds, unless a later time is told first. `is_starting`: a process may have been started whose
    group has not been told yet. `testimony`: the first line for the program that testifies, b"" for none; `testify_s`:
    for how long after the agent's end it is tried.
    """

    groups: set[int] = field(default_factory=set)
    folders: list[str] = field(default_factory=list)
    until: float = float("inf")
    is_starting: bool = False
    testimony: bytes = b""
    testify_s: float = 0.0

    def take(self, line: bytes) -> None:
        command, _, operand = line.decode().partition(" ")
        match command:
            case "watch":
                self.groups.add(int(operand))
            case "forget":
                self.groups.discard(int(operand))
            case "until":
                self.until = float(operand)
            case "remove":
                self.folders.append(operand)
            case "starting":
                self.is_starting = True
            case "started":
                self.is_starting = False
            case "testify":
                seconds, _, first_line = operand.partition(" ")
                self.testify_s, self.testimony = float(seconds), first_line.encode()


def main() -> None:
    """Follow orders until the agent is gone; then clean up."""
    for number in _FOR_OTHERS:
        signal.signal(number, signal.SIG_IGN)
    orders = Orders()
    _follow(orders)
    deadline = time.monotonic() + orders.testify_s
    testimony = _begin_testimony(orders)  # before the groups are killed: it starts while they end
    kill(orders.groups)
    if orders.is_starting:
        _kill_newcomers(orders.folders)
    if testimony is not None:
        # Whether a process that had just been started is running, nobody knows: then the lease has to run out.
        if not orders.is_starting and wait_for_end(orders.groups, deadline):
            _say(testimony, b"gone")
        else:
            testimony.kill()
    for folder in orders.folders:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    if testimony is not None:
        testimony.wait()


def _follow(orders: Orders) -> None:
    heard = b""
    while True:
        left_s = orders.until - time.monotonic()
        if left_s <= 0:
            kill(orders.groups)
            orders.until = float("inf")
            continue
        if not select.select([0], [], [], min(left_s, _LONGEST_S))[0]:
            continue
        more = os.read(0, 1 << 16)
        if not more:
            return
        *lines, heard = (heard + more).split(b"\n")
        for line in lines:
            orders.take(line)


def kill(groups: set[int]) -> None:
    """Kill all members of these process groups."""
    for group in groups:
        for send in (os.killpg, os.kill):  # a worker that is about to run a function may not lead its group yet
            try:
                send(group, signal.SIGKILL)
                break
            except (ProcessLookupError, PermissionError):
                continue


def _kill_newcomers(folders: list[str]) -> None:
    """Kill processes that were being started when the agent died, and their groups. In their environments they have a
    socket in one of `folders`, which are the agent's own."""
    deadline = time.monotonic() + _NEWCOMERS_S
    while folders and time.monotonic() < deadline:
        for name in os.listdir("/proc"):
            if name.isdigit() and _has_socket_in(folders, name):
                kill({int(name)})
        time.sleep(_AGAIN_S)


def _has_socket_in(folders: list[str], pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(f"{_SOCKET}={folder}/".encode()) for variable in variables for folder in folders)


def wait_for_end(groups: set[int], deadline: float) -> bool:
    """Kill these process groups until they have no living members, or time.monotonic() has reached `deadline`. Returns
    whether they have none."""
    while _have_members(groups):
        if time.monotonic() >= deadline:
            return False
        kill(groups)
        time.sleep(_AGAIN_S)
    return True


def _have_members(groups: set[int]) -> bool:
    """Whether a process of these groups is alive: not one that has ended and that its parent has not waited for, if all
    of its threads have ended too."""
    for name in os.listdir("/proc") if groups else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()  # from the third field on, as proc(5) counts them
            is_member = int(fields[2]) in groups or int(name) in groups
            if is_member and not (fields[0] in (b"Z", b"X") and int(fields[17]) <= 1):
                return True
        except (OSError, IndexError):
            continue
    return False


def _begin_testimony(orders: Orders) -> Any:
    """Start the program that testifies in etcd; it waits for a second line on its standard input. None without one."""
    if not orders.testimony:
        return None
    import subprocess  # it takes as long to import as everything else here

    path = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{_ROOT}" if path else _ROOT}
    command = [sys.executable, "-P", "-m", _TESTIMONY]
    testimony = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    _say(testimony, orders.testimony)
    return testimony


def _say(testimony: Any, line: bytes) -> None:
    try:
        testimony.stdin.write(line + b"\n")
        testimony.stdin.flush()
    except OSError:  # it has ended, and has said why
        pass


if __name__ == "__main__":
    main()
