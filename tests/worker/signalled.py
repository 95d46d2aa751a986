"""A worker's process that gets signals, its children too; what it does is told by its first argument."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.synchronize import Event

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from etc_agent.worker.process.signals import LeftToAgent


class Numbers(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)

    def __len__(self) -> int:
        return 1000


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def child(stop: Event) -> None:
    say("child", os.getpid())
    while not stop.wait(0.05):
        pass
    say("the child has gone on")


def children(method: str) -> None:
    """Train on, with workers of a loader and a forked child, after everything was signalled."""
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    own = context.Process(target=child, args=(stop,), daemon=True)
    own.start()
    batches = iter(DataLoader(Numbers(), num_workers=2, prefetch_factor=1, multiprocessing_context=method))
    for _ in range(2):  # one of each worker
        next(batches)
    for loader in multiprocessing.active_children():
        say("loader", loader.pid)
    say("ready")
    sys.stdin.readline()
    say("batches", sum(len(batch) for batch in batches))
    stop.set()
    own.join()
    say("exit code of the child", own.exitcode)


def terminate() -> None:
    """End a child by the same signal while nobody else has got it."""
    context = multiprocessing.get_context("fork")
    own = context.Process(target=child, args=(context.Event(),))
    own.start()
    time.sleep(0.2)
    own.terminate()
    own.join(10)
    say("exit code of the child", own.exitcode)


def stuck() -> None:
    """Wait in C++, where no Python handler runs."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    say("ready")
    with contextlib.suppress(dist.DistStoreError):
        store.wait(["never"], timedelta(seconds=60))
    say("has waited")


def main(mode: str, *arguments: str) -> None:
    if mode == "own":
        signal.signal(signal.SIGTERM, lambda *_: say("the script's own handler"))
    left = LeftToAgent(lambda message: say("reported", message))
    match mode:
        case "children":
            children(*arguments)
        case "terminate":
            terminate()
        case "stuck":
            stuck()
        case "own":
            say("ready")
            sys.stdin.readline()
        case "after":
            left.close()
            say("ready")
            sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
