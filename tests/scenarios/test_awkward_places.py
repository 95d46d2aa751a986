"""Jobs in awkward places: folders that are too long, too small or closed, few open files, addresses of other kinds."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from running import TINY_JOB, Etcd, EtcRun, etcd_of, standalone, wait_for_more_steps, wait_for_step, wait_for_workers

from etc_agent.rendezvous.addresses import listen_at
from etc_agent.rendezvous.private.listen import OnPort
from etc_agent.rendezvous.private.server import EtcdServer
from tests.users import as_root, error_of_another_user

Cleanup = Callable[[EtcRun], EtcRun]

WORK = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("rank", dist.get_rank(), flush=True)
dist.destroy_process_group()
"""
CHATTER = "while True: print('x' * 10000, flush=True)"


def has_ipv6() -> bool:
    listener = listen_at("::1")
    if listener is not None:
        listener.close()
    return listener is not None


def written(tmp_path: Path, text: str) -> Path:
    script = tmp_path / "script.py"
    script.write_text(text)
    return script


def with_little_room(folder: Path, size: str) -> tuple[str, ...]:
    """A prefix under which `folder` is a file system of `size`, for the command alone."""
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={size} none {folder} && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", mount, "sh")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no mounts of our own here: {tried.stderr.strip()}")
    return prefix


def test_a_job_runs_where_tmpdir_is_too_long_for_a_socket(tmp_path: Path, cleanup: Cleanup) -> None:
    temporary = tmp_path / ("x" * 110)
    temporary.mkdir()
    job = cleanup(standalone(tmp_path, written(tmp_path, WORK), slots=2, environment={"TMPDIR": str(temporary)}))
    assert job.wait() == 0
    job.assert_nothing_left()
    assert not list(temporary.iterdir())


def test_a_full_log_folder_is_named_when_a_worker_fails_over_it(tmp_path: Path, cleanup: Cleanup) -> None:
    logs = tmp_path / "logs"
    prefix = with_little_room(logs, "100k")
    arguments = ("--standalone", "--rdzv-id", "job", "-r", "3", "--log-dir", logs, written(tmp_path, CHATTER))
    job = cleanup(EtcRun(*arguments, cwd=tmp_path, prefix=prefix))
    assert job.wait() == 1
    assert f"etc-run: no space left for a worker's output in {logs}/job/generation_1" in job.output


def test_a_temporary_folder_without_room_for_etcd_is_one_line(tmp_path: Path, cleanup: Cleanup) -> None:
    temporary = tmp_path / "small"
    prefix = with_little_room(temporary, "1m")
    arguments = ("--standalone", written(tmp_path, WORK))
    job = cleanup(EtcRun(*arguments, cwd=tmp_path, prefix=prefix, environment={"TMPDIR": str(temporary)}))
    assert job.wait() == 1
    (line,) = job.our_lines()
    assert f"no space left on device; make room in {temporary}" in line


def test_too_few_open_files_are_one_line_that_says_how_many_are_needed(tmp_path: Path, cleanup: Cleanup) -> None:
    prefix = ("sh", "-c", 'ulimit -n 64 && exec "$@"', "sh")
    job = cleanup(EtcRun("--standalone", written(tmp_path, WORK), cwd=tmp_path, prefix=prefix))
    assert job.wait() == 1
    (line,) = job.our_lines()
    assert "this shell allows 64 open files" in line
    assert "1 workers need 208; raise the hard limit with `ulimit -H -n 208`" in line


def test_a_low_limit_of_open_files_that_may_be_raised_is_raised(tmp_path: Path, cleanup: Cleanup) -> None:
    prefix = ("sh", "-c", 'ulimit -S -n 64 && exec "$@"', "sh")
    job = cleanup(EtcRun("--standalone", "--nproc-per-node", "2", written(tmp_path, WORK), cwd=tmp_path, prefix=prefix))
    assert job.wait() == 0


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")
def test_a_job_changes_size_at_an_ipv6_address(tmp_path: Path, cleanup: Cleanup) -> None:
    with EtcdServer(listen=OnPort("::1")) as server:
        job = cleanup(
            EtcRun(
                "--etcd-endpoints", server.endpoint, "--local-addr", "::1", "--rdzv-id", "job", "--nproc-per-node", 2,
                "--parallel", "PP1TP1DP1", TINY_JOB, tmp_path, 100_000, 0.05, "{}", cwd=tmp_path,
            )
        )
        etcd = Etcd(server.endpoint, "job")
        wait_for_step(tmp_path, 2)
        etcd.scale("2")
        etcd.reply_to("2", "done")
        wait_for_workers(tmp_path, 2)
        wait_for_more_steps(tmp_path, 3)
        assert etcd.get("nodes/0::1")["address"] == "::1"
        job.send(signal.SIGTERM)
        assert job.wait() == 143
    job.assert_nothing_left()


@as_root
def test_another_user_reaches_neither_the_private_etcd_nor_the_agent_nor_the_logs(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    logs = Path(tempfile.mkdtemp(dir="/tmp"))
    logs.chmod(0o755)
    options = ("-r", "3", "--log-dir", logs)
    job = cleanup(standalone(tmp_path, TINY_JOB, tmp_path, 100_000, 0.05, "{}", slots=1, options=options))
    etcd = etcd_of(job)
    wait_for_step(tmp_path, 2)
    sockets = Path(etcd.endpoint.removeprefix("unix://")).parent
    assert {path.name for path in sockets.iterdir()} >= {"control.sock", "etcd.sock:0"}

    def connect(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))

    for path in sockets.iterdir():
        if path.is_socket():
            connect(path)
            assert error_of_another_user(lambda path=path: connect(path)) == errno.EACCES, path  # type: ignore[misc]
    assert list((logs / "job").rglob("stdout.log"))
    assert error_of_another_user(lambda: os.listdir(logs / "job")) == errno.EACCES
    job.send(signal.SIGTERM)
    assert job.wait() == 143
    job.assert_nothing_left()
    assert not sockets.exists()
    shutil.rmtree(logs)


def test_nodes_whose_own_name_does_not_resolve_find_each_other(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    prefix = ("unshare", "--uts", "sh", "-c", 'hostname no-such-host && exec "$@"', "sh")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no host names of our own here: {tried.stderr.strip()}")
    arguments = ("--nnodes", 2, "--rdzv-id", "job", "--etcd-endpoints", etcd_server.endpoint, written(tmp_path, WORK))
    nodes = [cleanup(EtcRun(*arguments, cwd=tmp_path, prefix=prefix)) for _ in range(2)]
    assert [node.wait() for node in nodes] == [0, 0]
    assert {line for node in nodes for line in node.lines if line.startswith("rank")} == {"rank 0", "rank 1"}
