"""Signals to everything that a node runs, as schedulers send them, and ends without etcd."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from running import (
    TINY_JOB,
    Etcd,
    EtcRun,
    etcd_of,
    standalone,
    steps_of,
    wait_for_more_steps,
    wait_for_step,
    wait_for_workers,
)

from etc_agent.rendezvous.private.server import EtcdServer

Cleanup = Callable[[EtcRun], EtcRun]


def signal_all(job: EtcRun, number: signal.Signals = signal.SIGTERM) -> None:
    """To `etc-run` and to all that it has started, at once."""
    for pid in (*job.descendants(), job.process.pid):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def node(tmp_path: Path, server: EtcdServer, number: int, *arguments: object, **environment: str) -> EtcRun:
    return EtcRun(
        "--nnodes", "1:2", "--nproc-per-node", 1, "--rdzv-id", "job", "--rdzv-conf", "lease_s=4,end_s=2",
        "--etcd-endpoints", server.endpoint, "--local-addr", f"127.0.0.{number}", *arguments, cwd=tmp_path,
        environment=environment,
    )


def test_sigterm_to_every_process_ends_a_job_on_one_node_in_seconds(tmp_path: Path, cleanup: Cleanup) -> None:
    job = cleanup(standalone(tmp_path, TINY_JOB, tmp_path, 100_000, 0.05, slots=2))
    wait_for_step(tmp_path, 3)
    begin = time.monotonic()
    signal_all(job)
    assert job.wait() == 143
    assert time.monotonic() - begin < 20
    job.assert_nothing_left()


def test_sigterm_to_every_process_of_a_node_hands_its_state_over(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    tiny = (TINY_JOB, tmp_path, 100_000, 0.05)
    first, second = (cleanup(node(tmp_path, etcd_server, number, *tiny)) for number in (2, 3))
    wait_for_workers(tmp_path, 2)
    signal_all(first)
    assert first.wait() == 0
    first.assert_nothing_left()
    wait_for_more_steps(tmp_path, 5)
    lines = steps_of(tmp_path)
    every = {line["step"] for line in lines}
    assert every == set(range(max(every) + 1)), "no step was lost"
    assert len({line["pid"] for line in lines}) == 2, "no worker was restarted"
    signal_all(second)
    assert second.wait() == 143


def test_a_plain_script_goes_on_without_a_node_whose_processes_were_all_signalled(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('size', dist.get_world_size(), flush=True)\n"
        "for _ in range(100_000): dist.barrier(); time.sleep(0.05)\n"
    )
    first, second = (cleanup(node(tmp_path, etcd_server, number, script)) for number in (2, 3))
    second.wait_for("size 2")
    signal_all(first)
    assert first.wait() == 0
    second.wait_for("size 1")
    assert Etcd(etcd_server.endpoint, "job").get("current")["restarts"] == 0
    second.send(signal.SIGTERM)
    assert second.wait() == 143


def test_agents_end_with_0_when_all_workers_have_finished_while_etcd_was_away(
    tmp_path: Path, cleanup: Cleanup, etcd_server: Any
) -> None:
    tiny = (TINY_JOB, tmp_path, 100_000, 0.05)
    jobs = [cleanup(node(tmp_path, etcd_server, number, *tiny)) for number in (2, 3)]
    wait_for_workers(tmp_path, 2)
    etcd_server.kill()
    wait_for_more_steps(tmp_path, 5)
    last = steps_of(tmp_path)[-1]["step"] + 10
    (tmp_path / "last.part").write_text(str(last))
    (tmp_path / "last.part").rename(tmp_path / "last")
    assert [job.wait() for job in jobs] == [0, 0]
    assert steps_of(tmp_path)[-1]["step"] == last
    assert all("has finished; etcd has not answered" in job.output for job in jobs)


def test_a_job_outlives_its_terminal_under_nohup_and_hands_chosen_signals_to_its_workers(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('told', flush=True))\n"
        "print('hangup', signal.getsignal(signal.SIGHUP).name, flush=True)\n"
        "time.sleep(600)\n"
    )
    options = ("--forward-signals", "SIGUSR1")
    job = cleanup(EtcRun(
        "--standalone", "--nproc-per-node", 1, "--rdzv-id", "job", *options, script, cwd=tmp_path,
        prefix=("sh", "-c", 'trap "" HUP; exec "$@"', "sh"),
    ))
    job.wait_for("hangup SIG_IGN")
    signal_all(job, signal.SIGHUP)
    job.send(signal.SIGUSR1)
    job.wait_for("told", 60)
    etcd_of(job).get("current")
    assert job.process.poll() is None
    job.send(signal.SIGTERM)
    assert job.wait() == 143
    job.assert_nothing_left()
