"""How soon each kind of death is known: from the signal until the fact is in etcd, as another node's watch sees it.

Starts a private etcd and jobs of one or two nodes on this machine whose workers only wait. The last line is one JSON
object with the median and the worst of `--trials` for each kind:

  worker_ms          SIGKILL of a worker that runs a script, until its node's acknowledgement says so
  children_ms        the same with a child process of the worker that lives on in a session of its own
  agent_ms           SIGKILL of an agent, until its guardian's testimony
  agent_decided_ms   the same, until the other node has decided what follows
  lease_ms           SIGKILL of an agent and its guardian, until its record is gone with the lease
  lease_decided_ms   the same, until the other node has decided what follows
  hang_ms            SIGSTOP of a worker with hang_s = 1, until its node's acknowledgement says so

    python scripts/bench_detection.py --trials 10
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.values import Event
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.server import EtcdServer

TIMEOUT_S = 60.0
WORKER = """
import os, pathlib, subprocess, sys, time
if sys.argv[2] == "beating":
    import etc_agent
    etc_agent.heartbeat()
if sys.argv[2] == "children":
    subprocess.Popen(["sleep", "60"], start_new_session=True, close_fds=False)
pathlib.Path(sys.argv[1], f"worker-{os.environ['GROUP_RANK']}.part").write_text(str(os.getpid()))
os.rename(*(pathlib.Path(sys.argv[1], f"worker-{os.environ['GROUP_RANK']}{end}") for end in (".part", "")))
while True:
    time.sleep(0.2)
    if sys.argv[2] == "beating":
        etc_agent.heartbeat()
"""


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise click.ClickException(f"waited {TIMEOUT_S:.0f} s in vain for {what}")
        time.sleep(0.01)


class Watched:
    """Everything that changes under a job's prefix, with the time at which this program was told."""

    def __init__(self, client: EtcdClient, keys: JobKeys) -> None:
        self._events: list[tuple[float, Event]] = []
        self._new = threading.Condition()
        _, revision = client.get_prefix(keys.root)
        self._watch = client.watch_prefix(keys.root, revision + 1, self._add, lambda: 1)

    def _add(self, events: object, _: int) -> None:
        with self._new:
            self._events += [(time.monotonic(), event) for event in events]  # type: ignore[attr-defined]
            self._new.notify_all()

    def first(self, since: float, condition: Callable[[Event], object], what: str) -> float:
        """Milliseconds from `since` until the first event that fulfils `condition`."""
        deadline = time.monotonic() + TIMEOUT_S
        with self._new:
            while True:
                for at, event in self._events:
                    if at >= since and condition(event):
                        return 1000 * (at - since)
                if not self._new.wait(deadline - time.monotonic()):
                    raise click.ClickException(f"waited {TIMEOUT_S:.0f} s in vain for {what}")


class Job:
    """One job of nodes on this machine, each with one worker that waits."""

    def __init__(self, server: EtcdServer, client: EtcdClient, kind: str, folder: Path, *options: object) -> None:
        self.keys, self._folder, self._kind = JobKeys(kind), folder / kind, kind
        self._folder.mkdir()
        self._script = self._folder / "worker.py"
        self._script.write_text(WORKER)
        self._options, self._server = options, server
        self.watched = Watched(client, self.keys)

    @contextmanager
    def node(self, number: int, nnodes: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [
            sys.executable, "-m", "launcher.run", "--nnodes", nnodes, "--nproc-per-node", "1", "--rdzv-id", self._kind,
            "--etcd-endpoints", self._server.endpoint, "--local-addr", f"127.0.0.{number}", "--max-restarts", "10000",
            *self._options, self._script, self._folder, self._kind,
        ]
        with (self._folder / f"node-{number}").open("ab") as output:
            process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def worker(self, rank: int, but: int = 0) -> int:
        """The process id of the worker of node `rank`, once it is another than `but`."""
        file = self._folder / f"worker-{rank}"
        wait_until(lambda: file.exists() and int(file.read_text()) != but, "a worker")
        return int(file.read_text())

    def has_failed(self, event: Event) -> bool:
        return event.is_put and event.kv.key.startswith(self.keys.acks_prefix) and bool(event.kv.json()["failure"])


def workers(job: Job, number: signal.Signals, trials: int) -> Iterator[float]:
    """One trial after the other with the worker of a one-node job."""
    with job.node(2, "1"):
        pid = 0
        for _ in range(trials):
            pid = job.worker(0, but=pid)
            time.sleep(0.5)
            begin = time.monotonic()
            os.kill(pid, number)
            yield job.watched.first(begin, job.has_failed, "the failure")


def agents(job: Job, client: EtcdClient, trials: int, *, with_guardian: bool) -> Iterator[tuple[float, float]]:
    """Milliseconds until the death of the second node's agent is in etcd, and until the first node has decided."""
    with job.node(2, "1:2"):
        job.worker(0)
        for _ in range(trials):
            with job.node(3, "1:2") as victim:
                wait_until(lambda: client.get(job.keys.node("127.0.0.3")), "the second node")
                wait_until(lambda: _members(client, job.keys) == 2, "a generation with both")
                job.worker(1)
                time.sleep(0.5)
                children = Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
                guardian = next(int(pid) for pid in children if "guardian_process" in _command(pid))
                begin = time.monotonic()
                if with_guardian:
                    os.kill(guardian, signal.SIGKILL)
                victim.kill()
                gone = job.watched.first(begin, lambda event: _is_gone(event, job.keys), "the end")
                decided = job.watched.first(begin, lambda event: _decides(event, job.keys), "the decision")
                yield gone, decided
            (job._folder / "worker-1").unlink()
            for pid in children if with_guardian else ():
                _kill(int(pid))


def _members(client: EtcdClient, keys: JobKeys) -> int:
    current = client.get(keys.current)
    found = client.get(keys.generation(current.json()["committed"])) if current else None
    return len(found.json()["placement"]) if found else 0


def _is_gone(event: Event, keys: JobKeys) -> bool:
    return not event.is_put and event.kv.key == keys.node("127.0.0.3")


def _decides(event: Event, keys: JobKeys) -> bool:
    return event.is_put and event.kv.key == keys.current


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


@click.command()
@click.option("--trials", default=10, show_default=True, type=click.IntRange(1))
@click.option("--kind", "kinds", multiple=True, default=("worker", "children", "agent", "lease", "hang"))
def main(trials: int, kinds: tuple[str, ...]) -> None:
    """Measure how soon each kind of death is known."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(EtcdServer())
        client = stack.enter_context(EtcdClient([server.endpoint]))
        for kind in kinds:
            options = "start_s=1,hang_s=1" if kind == "hang" else "start_s=1"
            job = Job(server, client, "beating" if kind == "hang" else kind, folder, "--rdzv-conf", options)
            if kind in ("agent", "lease"):
                pairs = list(agents(job, client, trials, with_guardian=kind == "lease"))
                found[kind], found[f"{kind}_decided"] = [first for first, _ in pairs], [second for _, second in pairs]
            else:
                number = signal.SIGSTOP if kind == "hang" else signal.SIGKILL
                found[kind] = list(workers(job, number, trials))
            for name in (kind, f"{kind}_decided"):
                if name in found:
                    click.echo(f"{name}: {', '.join(f'{each:.0f}' for each in found[name])} ms")
    summary: dict[str, float] = {}
    for kind, times in found.items():
        summary[f"{kind}_ms"] = round(statistics.median(times), 1)
        summary[f"{kind}_worst_ms"] = round(max(times), 1)
    click.echo(json.dumps(summary))


if __name__ == "__main__":
    main()
