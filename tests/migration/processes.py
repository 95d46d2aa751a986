"""Runs a function in several real worker processes that share a gloo group, and brings back what each returned."""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "numpy", "etc_agent.migration.library"])


@dataclass
class Outcome:
    """How one worker ended: its value, or the traceback of its exception, or its exit code alone."""

    value: Any = None
    error: str | None = None
    exitcode: int | None = None


def gloo(store: dist.Store, name: str, rank: int, size: int, timeout_s: float = 30) -> dist.ProcessGroup:
    """A raw gloo backend on loopback."""
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, datetime.timedelta(seconds=timeout_s))


def run_workers(
    function: Callable[..., Any], size: int, *args: Any, limit_s: float = 60, silent: Collection[int] = (),
    told_port: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Call ``function(rank, size, store, *args)`` in `size` processes; every process is gone afterwards.

    `silent`: ranks from which no answer is expected; they are killed when the others have answered. `told_port`: is
    told where the workers' store is.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if told_port is not None:
        told_port(store.port)
    children = []
    for rank in range(size):
        ours, theirs = _context.Pipe()
        child = _context.Process(target=_main, args=(theirs, function, rank, size, store.port, args), daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
    outcomes = []
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=limit_s)
    for rank, (_, pipe) in enumerate(children):
        if rank in silent:
            outcomes.append(Outcome(error="silent"))
            continue
        left_s = max(0.0, (deadline - datetime.datetime.now()).total_seconds())
        outcome = Outcome(error=f"no answer within {limit_s} s")
        if pipe.poll(left_s):
            try:
                outcome = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcome = Outcome()
        outcomes.append(outcome)
    for rank, ((child, _), outcome) in enumerate(zip(children, outcomes, strict=True)):
        child.join(0 if rank in silent else 5)
        if child.is_alive():
            child.kill()
            child.join()
        outcome.exitcode = child.exitcode
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """The values of workers that must all have succeeded."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"worker {rank}: {outcome.error}"
        assert outcome.exitcode == 0, f"worker {rank} exited with {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def _main(
    pipe: multiprocessing.connection.Connection,
    function: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        outcome = Outcome(function(rank, size, store, *args))
    except Exception:
        outcome = Outcome(error=traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))  # plain pickle: tensors by value
