"""The same loss under torchft: replicas of the tiny model, one of which is killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from recovery.job import TIMEOUT_S, JsonLines, RecoveryError

SCRIPT = Path(__file__).with_name("tiny_torchft.py")
NUM_REPLICAS = 4


class Replicas:
    """A lighthouse and replicas, run by the interpreter `python`, which has torchft. Ended at the end of `with`."""

    def __init__(self, python: Path, folder: Path) -> None:
        folder.mkdir()
        self._python, self._folder = python, folder
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._steps = [JsonLines(folder / f"steps-{number}.jsonl") for number in range(NUM_REPLICAS)]
        with ExitStack() as stack:
            server = subprocess.Popen(
                [python, SCRIPT, "lighthouse"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            stack.callback(lambda: (server.kill(), server.wait()))
            assert server.stdout is not None
            self._address = server.stdout.readline().strip()
            stack.callback(self._end)
            for number in range(NUM_REPLICAS):
                self._start(number)
            self._stack = stack.pop_all()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def lose(self, number: int) -> float:
        """Seconds from SIGKILL of the replica to the end of the next step of the others. It is started again."""
        self._settle()
        began = time.time()
        self._running[number].send_signal(signal.SIGKILL)
        first = self._wait(lambda: self._step_since(began, number), "a step of the others")
        self._running[number].wait()
        self._start(number)
        return float(first["time"]) - began

    def _step_since(self, began: float, lost: int) -> dict[str, Any] | None:
        """The first step that all the others have completed since."""
        firsts = []
        for number in set(range(NUM_REPLICAS)) - {lost}:
            later = [line for line in self._lines(number)[-200:] if line["time"] > began]
            # A step that was complete on others when the replica died still counts it.
            after = [line for line in later if line["participants"] < NUM_REPLICAS]
            if not after:
                return None
            firsts.append(after[0])
        return min(firsts, key=lambda line: line["time"])

    def _settle(self) -> None:
        def is_settled() -> bool:
            recent = [self._lines(number)[-8:] for number in range(NUM_REPLICAS)]
            alive = {process.pid for process in self._running.values()}
            return all(
                len(lines) == 8 and all(line["participants"] == NUM_REPLICAS and line["pid"] in alive for line in lines)
                for lines in recent
            )

        self._wait(is_settled, f"{NUM_REPLICAS} replicas to train")

    def _start(self, number: int) -> None:
        command = [self._python, SCRIPT, self._address, str(number), self._steps[number].path]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self._folder / f"output-{number}").open("a") as output:
            self._running[number] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def _end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def _lines(self, number: int) -> list[dict[str, Any]]:
        return self._steps[number].read()

    def _wait(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise RecoveryError(f"torchft: waited {TIMEOUT_S:.0f} s in vain for {what}")
            time.sleep(0.005)
        return value
