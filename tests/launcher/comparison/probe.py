"""What the launchers are compared over: a worker that writes down what it finds, and then does as it is told.

probe.py FOLDER ACTION [ARGUMENT ...]. Imports no torch, except for `record`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def report(folder: Path) -> None:
    """Write the environment and the arguments down, then wait until every rank of this attempt has."""
    facts = {"environment": dict(os.environ), "arguments": sys.argv[2:], "cwd": os.getcwd()}
    path = folder / f"{ATTEMPT}-{RANK}"
    path.with_suffix(".new").write_text(json.dumps(facts))
    path.with_suffix(".new").rename(path.with_suffix(".json"))
    while len(list(folder.glob(f"{ATTEMPT}-*.json"))) < WORLD:
        time.sleep(0.01)


def say(what: str) -> None:
    for file, name in ((1, "out"), (2, "err")):
        os.write(file, f"{name} {RANK} {what}\n".encode())  # at once, or the lines of two ranks mix


def listen(*, deaf: bool) -> None:
    """Say which signals come; without `deaf`, the first ends the process."""

    def heard(number: int, _: object) -> None:
        say(signal.Signals(number).name)
        if not deaf:
            sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, heard)
    say("listens")


def raise_recorded() -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def work() -> None:
        raise ValueError("the cause")

    work()


def main(folder: Path, action: str, *arguments: str) -> None:
    fails = action in ("exit", "kill", "raise") or (action == "recover" and int(arguments[0]) > ATTEMPT)
    waits = action in ("signals", "deaf") or (fails and RANK != WORLD - 1)  # the last rank fails alone
    if waits:
        listen(deaf=action == "deaf")
    report(folder)
    if waits:
        time.sleep(60)
    match action:
        case "say":
            for word in arguments:
                say(word)
        case "recover":
            say(f"attempt {ATTEMPT}")
            sys.exit(9 if fails else 0)
        case "exit":
            say("exits")
            sys.exit(int(arguments[0]))
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise_recorded()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
