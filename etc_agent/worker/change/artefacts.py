"""Compile artefacts: what torch.compile has made on the workers of the old generation, for those that join.

A worker that joins then finds its graphs in the compiler's cache instead of compiling them while all others wait for it
in the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from etc_agent.errors import named
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.change.crew import Crew

_log = logging.getLogger(__name__)


def share_artefacts(group: dist.ProcessGroup, crew: Crew, previous: ParallelConfig) -> None:
    """Give the workers that join the artefacts of one worker of each pipeline stage of the generation before.
    Collective over the crew; nothing is sent where nobody joins, or nothing was compiled.

    Raises:
        RuntimeError: a worker was lost.
    """
    if not crew.joining:
        return
    for source in _sources(crew, previous):
        artefacts = _received(group, source, _own() if crew.worker == source else b"")
        if artefacts and crew.worker in crew.joining:
            _load(artefacts)


def _sources(crew: Crew, previous: ParallelConfig) -> Sequence[int]:
    """The first worker of each stage, as far as one is left."""
    first: dict[int, int] = {}
    for worker, rank in enumerate(crew.old_ranks):
        if rank is not None:
            first.setdefault(previous.coordinate(rank).pp, worker)
    return sorted(first.values())


def _received(group: dist.ProcessGroup, source: int, own: bytes) -> bytes:
    size = torch.tensor([len(own)], dtype=torch.int64, device="cpu")
    group.broadcast(size, source).wait()
    if not int(size):
        return b""
    payload = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    if own:
        payload = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    group.broadcast(payload, source).wait()
    return own or payload.numpy().tobytes()


def _own() -> bytes:
    """Nothing where nothing was compiled, or a compilation is under way on the main thread."""
    try:
        saved = torch.compiler.save_cache_artifacts()
    except Exception as error:
        _log.info("compile artefacts are not passed on: %s", named(error))
        return b""
    return b"" if saved is None else saved[0]


def _load(artefacts: bytes) -> None:
    try:
        torch.compiler.load_cache_artifacts(artefacts)
    except Exception as error:
        _log.warning("compile artefacts of another worker cannot be used, so this one compiles: %s", named(error))
