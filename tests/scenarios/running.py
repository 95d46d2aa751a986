"""Real `etc-run` processes under test: started, talked to, waited for, and searched for what they left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.launchers import Executed, Forked

ROOT = Path(__file__).resolve().parents[2]
TINY_JOB = ROOT / "tests" / "worker" / "tiny_job.py"
TIMEOUT_S = 120.0
SPARES = "cold"
"""Most scenarios are about something else, and leave the machine to the workers."""


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what}")


class EtcRun:
    """One `etc-run` process. Everything it starts carries a mark in its environment, by which it is found again.

    `prefix`: a command that runs its arguments in its own place, such as `Host.prefix`. `launcher`: torchrun, to
    compare with it.
    """

    def __init__(
        self, *arguments: object, cwd: Path, environment: dict[str, str] | None = None, prefix: tuple[str, ...] = (),
        launcher: str = "etc-run",
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._output = cwd / f"output.{self.mark}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ETC_", "PET_"))}
        known = {**inherited, "OMP_NUM_THREADS": "1", "MARK": self.mark, "ETC_SPARES": SPARES, **(environment or {})}
        words = [str(argument) for argument in arguments]
        self.process = (
            Executed(launcher, words, known, cwd, self._output, self._output, prefix) if prefix
            else Forked(launcher, words, known, cwd, self._output, self._output)
        )

    @property
    def lines(self) -> list[str]:
        """Every whole line that it and its workers have written."""
        return self.output.splitlines()

    @property
    def output(self) -> str:
        text = self._output.read_text(errors="replace") if self._output.exists() else ""
        return text if self.process.poll() is not None else text[: text.rfind("\n") + 1]

    def wait_for(self, pattern: str, timeout_s: float = TIMEOUT_S) -> re.Match[str]:
        """Wait for a line that matches `pattern`."""

        def found() -> re.Match[str] | None:
            has_ended = self.process.poll() is not None
            match = re.search(pattern, self.output)
            assert match or not has_ended, (
                f"it ended with {self.process.poll()} before {pattern!r}:\n{self.output}"
            )
            return match

        try:
            return wait_until(found, repr(pattern), timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; its output:\n{self.output}") from None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code."""
        code = self.process.wait(timeout_s)
        assert code is not None, f"it did not end in {timeout_s:.0f} s:\n{self.output}"
        return code

    def descendants(self) -> dict[int, str]:
        """pid -> command of every living process of this job but etc-run itself."""
        return {pid: command for pid, command in marked(self.mark) if pid != self.process.pid}

    def assert_nothing_left(self) -> None:
        """Everything that it started ends within moments of it."""
        wait_until(lambda: not self.descendants(), f"the end of {self.descendants()}", 10.0)

    def our_lines(self) -> list[str]:
        """What etc-run itself said."""
        return [line for line in self.lines if line.startswith("etc-run: ")]

    def kill(self) -> None:
        """End everything, for a test that is over."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
        for pid in self.descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """(pid, command line) of every living process whose environment has the mark."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
        except OSError:
            continue


class Etcd:
    """An administrator's view of one job's keys, through plain etcdctl."""

    def __init__(self, endpoint: str, run_id: str) -> None:
        self.endpoint, self.run_id = endpoint, run_id

    def _etcdctl(self, *arguments: str) -> str:
        return subprocess.run(
            ["etcdctl", f"--endpoints={self.endpoint}", *arguments],
            env={"ETCDCTL_API": "3", "PATH": os.environ["PATH"]},
            check=True, capture_output=True, text=True, timeout=20,
        ).stdout

    def put(self, key: str, value: str) -> None:
        self._etcdctl("put", f"/etc-run/{self.run_id}/{key}", value)

    def get(self, key: str) -> Any:
        text = self._etcdctl("get", "--print-value-only", f"/etc-run/{self.run_id}/{key}").strip()
        return json.loads(text) if text else None

    def delete(self, key: str) -> None:
        self._etcdctl("del", f"/etc-run/{self.run_id}/{key}")

    def keys(self) -> list[str]:
        return self._etcdctl("get", "--prefix", "--keys-only", "/etc-run/").split()

    def scale(self, value: str) -> None:
        self.put("control/scale", value)

    def reply_to(self, request: str, *results: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The reply to `request`, once it is one of `results`."""

        def reply() -> dict[str, Any] | None:
            found = self.get("control/reply")
            return found if found and found["request"] == request and found["result"] in results else None

        return wait_until(reply, f"a reply to {request}: {' or '.join(results)}", timeout_s)


def etcd_leader(etcd: Etcd) -> str:
    """The name of the node that leads; empty while none does."""
    return etcd._etcdctl("get", "--print-value-only", f"/etc-run/{etcd.run_id}/leader").strip()


def standalone(
    tmp_path: Path,
    *script: object,
    slots: int = 4,
    options: tuple[object, ...] = (),
    environment: dict[str, str] | None = None,
) -> EtcRun:
    """A job on one node with its private etcd."""
    return EtcRun(
        "--standalone", "--nproc-per-node", slots, "--rdzv-id", "job", *options, *script, cwd=tmp_path,
        environment=environment,
    )


def etcd_of(job: EtcRun) -> Etcd:
    match = job.wait_for(r"etcd: (\S+) run id: (\S+)")
    return Etcd(match[1], match[2])


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Every line that the workers of a tiny job have written, by step and rank."""
    lines = []
    for file in folder.glob("steps-*.jsonl"):
        lines += [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return sorted(lines, key=lambda line: (line["step"], line["rank"]))


def wait_for_step(folder: Path, step: int) -> None:
    wait_until(lambda: any(line["step"] >= step for line in steps_of(folder)), f"step {step}")


def wait_for_workers(folder: Path, count: int) -> None:
    """Until so many processes have trained: a change is done before the workers that join have ended a step."""
    wait_until(lambda: len({line["pid"] for line in steps_of(folder)}) >= count, f"steps of {count} workers")


def wait_for_more_steps(folder: Path, count: int) -> None:
    """So many beyond the last one that is written now."""
    wait_for_step(folder, max(line["step"] for line in steps_of(folder)) + count)
