"""Plain scripts whose process groups are made again: in one process, and after restarts.

The scripts write their lines at once. Launchers start workers with ``python -u``, under which `print` writes a line in
pieces, and those of workers that share one output fall between each other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from etc_agent.agent.processes import torch_hook
from etc_agent.control.channel import SOCKET_VARIABLE
from etc_agent.worker.process import group_numbers

ROUNDS = r"""
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
assert "etc_agent.worker.process.group_numbers" in sys.modules
for number in range(6):
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    dist.new_group([0, 1])
    dist.barrier()  # one that is through must not close what the other is still connecting to
    dist.destroy_process_group()
os.write(1, f"done {os.environ['RANK']}\n".encode())
"""

RESTARTS = r"""
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
ones = torch.ones(1)
dist.all_reduce(ones)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, f"attempt {attempt} {dist.get_rank()}\n".encode())
dist.barrier()  # the failure of one ends both
if dist.get_rank() == 1 and attempt == 0:
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""


def run(tmp_path: Path, text: str, *options: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "launcher.run", "--standalone", "--nproc-per-node=2", *options, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("options", [(), ("--run-path", "--start-method=spawn"), ("--run-path", "--start-method=fork")])
def test_a_script_may_init_and_destroy_its_process_group_again_and_again(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert set(re.findall(r"done \d", run(tmp_path, ROUNDS, *options))) == {"done 0", "done 1"}


def test_a_restart_meets_nothing_that_the_attempt_before_has_left(tmp_path: Path) -> None:
    output = run(tmp_path, RESTARTS, "--max-restarts=1")
    assert len(re.findall(r"attempt [01] [01]", output)) == 4


def test_one_that_gave_up_waiting_tries_the_same_round_again() -> None:
    from torch.distributed import HashStore

    store, ranks = HashStore(), [group_numbers.NumberedRendezvous(lambda url: iter([(store, 0, 2)])) for _ in range(2)]

    def enter(rank: int) -> bytes:
        """Who is here, as a key in the store of the round."""
        (of_round, _, _) = next(ranks[rank]("env://"))
        return str(of_round.add("here", 1)).encode()

    assert enter(0) == b"1"
    assert enter(0) == b"2", "nobody else has come: the same round"
    assert enter(1) == b"3", "and the other finds it there"
    assert enter(1) == b"1", "all have entered: the next one"
    assert enter(0) == b"2"


def test_nothing_is_changed_outside_our_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.rendezvous import _rendezvous_handlers

    assert group_numbers._STARTED_BY_OUR_AGENT == SOCKET_VARIABLE
    before = dict(_rendezvous_handlers)
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    group_numbers.install()
    assert _rendezvous_handlers == before


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "{ours}"), ({"PYTHONPATH": "/a:"}, "/a::{ours}"), ({"PYTHONPATH": "{ours}:/a"}, "{ours}:/a")],
)
def test_the_search_path_of_a_worker_ends_in_our_folder(given: dict[str, str], expected: str) -> None:
    environment = {name: value.format(ours=torch_hook.FOLDER) for name, value in given.items()}
    assert torch_hook.search_path(environment) == {"PYTHONPATH": expected.format(ours=torch_hook.FOLDER)}


def test_a_worker_whose_python_has_no_etc_run_imports_torch_all_the_same(tmp_path: Path) -> None:
    """Its Python finds our entry point through PYTHONPATH, and no package of ours."""
    program = f"import sys; sys.path[:0] = [{str(torch_hook.FOLDER)!r}]; import etc_run_worker as o; o.install()"
    environment = {**os.environ, SOCKET_VARIABLE: "/nowhere"}
    subprocess.run([sys.executable, "-I", "-S", "-c", program], env=environment, cwd=tmp_path, timeout=60, check=True)
