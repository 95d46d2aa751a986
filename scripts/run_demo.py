"""What `make run` shows: a real job trains on real text and changes its size four times without a restart.

It starts ``etc-run --standalone --config configs/gpt-tiny.yaml``, puts keys with plain ``etcdctl`` as an administrator
would, and stops the job when it has seen enough. At the end: what each change moved and how long training stood still,
which processes stayed, and out/loss.png. The exit code is not 0 if a change failed, a worker that should have stayed
did not, or a sample was skipped or repeated.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from demo_picture import draw_loss
from rich.console import Console

from etc_agent.errors import EtcError
from etc_agent.reconfig.known.records import History, Result
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.mirror import Mirror, Snapshot
from launcher.ctl.job.jobs import job_of, reply_of
from launcher.ctl.show.tables import console, history_table

ROOT = Path(__file__).parent.parent
CHANGES = ("PP2TP2DP1", "PP1TP2DP2", "PP2TP1DP1", "PP1TP1DP4")
_ANNOUNCED = re.compile(r"etcd: (\S+) run id: (\S+)")
_POLL_S = 0.2


class DemoError(EtcError):
    """The demo did not show what it promises."""


class Job:
    """The running ``etc-run``: its output goes to a file, its own lines to the console too."""

    def __init__(self, config: Path, out: Path, shown: Console) -> None:
        self.steps_file, self.samples, self.output = out / "gpt-tiny.jsonl", out / "gpt-tiny-samples", out / "job.log"
        out.mkdir(parents=True, exist_ok=True)
        self.steps_file.unlink(missing_ok=True)
        shutil.rmtree(self.samples, ignore_errors=True)
        self._shown = shown
        self._announced: tuple[str, str] | None = None
        command = [sys.executable, "-m", "launcher.run", "--standalone", "--config", str(config)]
        shown.print(f"[bold]$ etc-run {' '.join(command[3:])}", highlight=False)
        # A session of its own, so that Ctrl-C reaches us alone and we stop the job in order.
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.output.open("w") as file:
            for line in self.process.stdout:
                file.write(line)
                file.flush()
                if (found := _ANNOUNCED.search(line)) is not None:
                    self._announced = found[1], found[2]
                if "etc-run:" in line or "Error" in line:
                    self._shown.print(f"  {line.rstrip()}", style="dim", markup=False, highlight=False)

    def endpoint(self, timeout_s: float) -> tuple[str, str]:
        """etcd's address and the run id, as etc-run prints them."""
        for _ in self.until(timeout_s, "etc-run to say where its etcd is"):
            if self._announced is not None:
                return self._announced
        raise AssertionError("until() raises when the time is over")

    def steps(self) -> list[dict[str, Any]]:
        """The training log so far; a line that is being written is left out."""
        if not self.steps_file.exists():
            return []
        lines = self.steps_file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def train_until(self, step: int, timeout_s: float) -> None:
        """Wait until `step` has been trained, with a sign of life now and then."""
        said = 0.0
        for _ in self.until(timeout_s, f"step {step}"):
            steps = self.steps()
            if steps and time.monotonic() - said > 2:
                said, last = time.monotonic(), steps[-1]
                took = f"{last['step_s'] * 1e3:.0f} ms"
                line = f"  step {last['step']:4d}  loss {last['loss']:.4f}  {last['config']}  {took}"
                self._shown.print(line, highlight=False)
            if steps and steps[-1]["step"] >= step:
                return

    def until(self, timeout_s: float, what: str) -> Iterator[None]:
        """Poll while the job lives. Raises DemoError when it has ended, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            yield
            if self.process.poll() is not None:
                raise DemoError(f"the job ended (exit code {self.process.returncode}) before {what}; see {self.output}")
            time.sleep(_POLL_S)
        raise DemoError(f"waited {timeout_s:g} s for {what}; see {self.output}")

    def stop(self, grace_s: float = 60.0) -> None:
        """SIGTERM, which drains; SIGKILL where that hangs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._shown.print(f"etc-run did not stop within {grace_s:g} s and is killed", style="red")
                self.process.kill()
                self.process.wait()
        self._reader.join(10)


def etcdctl() -> str:
    """The etcdctl binary: on PATH, or beside this interpreter.

    Raises:
        DemoError: there is none.
    """
    beside = str(Path(sys.executable).parent)
    found = shutil.which("etcdctl") or shutil.which("etcdctl", path=beside)
    if found is None:
        raise DemoError("no etcdctl on PATH; make setup installs it (Debian: apt-get install etcd-client)")
    return found


class Administrator:
    """Puts keys with etcdctl, and watches what comes of them."""

    def __init__(self, client: EtcdClient, run_id: str, shown: Console) -> None:
        self._endpoint = client.endpoints[0]
        self._keys = JobKeys(run_id)
        self._mirror = Mirror(client, self._keys.root)
        self._shown = shown

    def close(self) -> None:
        self._mirror.close()

    def history(self) -> list[History]:
        """The generations so far."""
        history = job_of(self._mirror.snapshot(), self._keys).records.history
        return [history[generation] for generation in sorted(history)]

    def change(self, job: Job, config: str, timeout_s: float) -> History:
        """Ask for `config`, and wait until the job has changed and trained a step.

        Raises:
            DemoError: the request was refused, or did not end in time.
        """
        revision = self._put(self._keys.scale, config)
        for _ in job.until(timeout_s, f"the change to {config}"):
            record = self._outcome(self._mirror.snapshot(), config, revision)
            if record is not None:
                self._shown.print(
                    f"  [green]{config}[/] from step {record.step}: {record.kept} workers kept, {record.started} "
                    f"started, {record.stopped} stopped; the first step ended after {record.stop_ms:.0f} ms"
                )
                return record
        raise AssertionError("until() raises when the time is over")

    def _put(self, key: str, value: str) -> int:
        """Put one key as an administrator would. Returns its revision."""
        arguments = ["--endpoints", self._endpoint, "put", key, value]
        self._shown.print(f"[bold]$ etcdctl {' '.join(arguments)}", highlight=False)
        before = self._mirror.snapshot().get(key)
        environment = {**os.environ, "ETCDCTL_API": "3"}
        subprocess.run([etcdctl(), *arguments], check=True, env=environment, stdout=subprocess.DEVNULL, timeout=30)
        if not self._mirror.wait_for(lambda now: now.get(key) != before, 10):
            raise DemoError(f"the key {key} that etcdctl put was not seen within 10 s")
        return self._mirror.snapshot()[key].mod_revision

    def _outcome(self, now: Snapshot, config: str, revision: int) -> History | None:
        """The history of the change that was asked for at `revision`, once it is complete."""
        reply = reply_of(now, self._keys)
        if reply is None or reply.revision != revision:
            return None
        if reply.result in (Result.REFUSED, Result.RESTARTED):
            raise DemoError(f"{config}: {reply.result}: {reply.message}")
        item = now.get(self._keys.history(reply.generation or 0))
        record = History.from_json(item.json()) if item and reply.result is Result.DONE else None
        return record if record is not None and record.stop_ms is not None else None


def median_step_ms(steps: list[dict[str, Any]]) -> dict[int, float]:
    """Milliseconds of a median step of each generation, its first one apart."""
    durations: dict[int, list[float]] = defaultdict(list)
    for line in steps:
        durations[line["generation"]].append(line["step_s"] * 1e3)
    return {generation: statistics.median(times[1:]) for generation, times in durations.items() if len(times) > 1}


def processes_by_generation(samples: Path) -> dict[int, set[int]]:
    """Which processes trained in each generation: every worker writes its samples to a file named by its pid."""
    processes: dict[int, set[int]] = defaultdict(set)
    for path in samples.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            processes[json.loads(line)["generation"]].add(int(path.stem.removeprefix("samples-")))
    return dict(sorted(processes.items()))


def samples_by_step(samples: Path) -> dict[int, Counter[int]]:
    """How often each sample was trained on in each step, by one rank of each (pp, tp) group."""
    by_step: dict[int, Counter[int]] = defaultdict(Counter)
    for path in samples.glob("samples-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["pp"] == line["tp"] == 0:
                by_step[line["step"]].update(line["ids"])
    return by_step


def check_samples(samples: Path) -> tuple[int, int]:
    """How many samples were trained on, in how many steps; the last step may have been cut short and is left out.

    Raises:
        DemoError: a sample was repeated or skipped, or a step had more or fewer than another.
    """
    by_step = samples_by_step(samples)
    steps = sorted(by_step)[:-1]
    seen = Counter(sample for step in steps for sample in by_step[step].elements())
    sizes = {sum(by_step[step].values()) for step in steps}
    once = seen.total() == len(seen) and set(seen) == set(range(len(seen)))
    if steps != list(range(len(steps))) or len(sizes) != 1 or not once:
        raise DemoError(f"a sample was skipped or repeated; see the files in {samples}")
    return len(seen), len(steps)


def check_run(history: list[History], job: Job, shown: Console) -> None:
    """Say which processes stayed, and check that and the samples against what must be.

    Raises:
        DemoError: something that was promised did not hold.
    """
    processes = processes_by_generation(job.samples)
    for record in history:
        pids = processes.get(record.generation, set())
        kept = pids & processes.get(record.previous, set())
        if record.previous:
            shown.print(
                f"generation {record.generation} {record.config}: pids {' '.join(map(str, sorted(kept)))} stayed"
                + (f", {' '.join(map(str, sorted(pids - kept)))} are new" if pids - kept else ""), highlight=False,
            )
            if len(kept) != record.kept:
                raise DemoError(f"{record.kept} processes should have stayed; {len(kept)} trained before and after")
    num_samples, num_steps = check_samples(job.samples)
    shown.print(f"{num_samples} samples in {num_steps} steps: none skipped, none repeated", highlight=False)


@contextmanager
def running(config: Path, out: Path, shown: Console) -> Iterator[Job]:
    """The job, stopped at the end whatever happens."""
    job = Job(config, out, shown)
    try:
        yield job
    finally:
        job.stop()


@click.command(help=__doc__)
@click.option("--config", type=Path, default=ROOT / "configs" / "gpt-tiny.yaml", show_default="configs/gpt-tiny.yaml")
@click.option("--steps-between", default=20, show_default=True, help="Steps trained in each size.")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="Seconds for each change.")
def main(config: Path, steps_between: int, timeout_s: float) -> None:
    out, shown = ROOT / "out", console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        etcdctl()
        with running(config, out, shown) as job:
            endpoint, run_id = job.endpoint(timeout_s)
            with EtcdClient([endpoint]) as client:
                administrator = Administrator(client, run_id, shown)
                job.train_until(steps_between, timeout_s)
                for target in CHANGES:
                    record = administrator.change(job, target, timeout_s)
                    job.train_until(record.step + steps_between, timeout_s)
                history = administrator.history()
                administrator.close()
            shown.print("seen enough; stopping the job with SIGTERM")
        steps = job.steps()
        step_ms = median_step_ms(steps)
        shown.print(history_table(history, step_ms))
        shown.print("stopped training: from the last step's end to the first one's, less a median step of the new size")
        check_run(history, job, shown)
        draw_loss(steps, history, step_ms, out / "loss.png")
        shown.print(f"the loss, with the changes marked: {out / 'loss.png'}", highlight=False)
    except KeyboardInterrupt:
        shown.print("interrupted; the job was stopped")
        sys.exit(130)
    except EtcError as error:
        print(f"run_demo: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
