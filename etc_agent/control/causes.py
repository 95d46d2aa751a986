"""The kind of an error in a worker: its own error, or the consequence of a peer's.

The kind follows from the types of the exceptions and from where they were raised, never from their text: a dataset's
own ``ConnectionError: connection reset by peer`` is the script's failure. Native code raises a plain RuntimeError for
every error, so there the innermost Python frame decides.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from etc_agent.errors import ConfigRefusedError, PeerLostError, RelayedError


class ErrorKind(StrEnum):
    """Ordered by how likely the error caused those of others. `MODEL`: the model cannot have this parallel config,
    which is final. `RAISED`: any other error of this worker's own. `UNCLEAR`: native code raised where it both computes
    and waits for peers, such as a backward pass. `PEER_LOST`: a peer went away, did not come in time or refused; the
    cause is that peer's own error."""

    MODEL = "model"
    RAISED = "raised"
    UNCLEAR = "unclear"
    PEER_LOST = "peer_lost"


_PEER_LOST_TYPES = {"torch.distributed.DistError", f"{PeerLostError.__module__}.{PeerLostError.__name__}"}
_PEER_LOST_TYPES |= {f"torch.distributed.{name}" for name in ("DistBackendError", "DistNetworkError", "DistStoreError")}
"""Each listed by name: a traceback in text does not contain the base classes of a type."""

_NATIVE = "builtins.RuntimeError"
_ONLY_WAITS = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/rendezvous.py",
    "/torch/distributed/_functional_collectives.py",
    "/etc_agent/worker/vote.py",
    "/etc_agent/worker/world/",
    "/etc_agent/worker/change/exchange.py",
    "/etc_agent/worker/change/attempt.py",
    "/etc_agent/migration/transport/",
)
"""Native calls in these files communicate with peers and do little else."""
_ALSO_WAITS = (
    "/torch/distributed/",
    "/torch/nn/parallel/",
    "/torch/autograd/graph.py",
    "/torch/futures/",
    "/etc_agent/worker/",
    "/etc_agent/migration/",
    "/etc_agent/torch_private/",
)
_WAITS = re.compile(r"\.wait\(")
"""Matches a line of a script that waits for a collective itself, such as ``handle.wait()``."""


@dataclass(frozen=True, slots=True)
class Raising:
    """One exception of a chain. `types`: the full names of its type and that type's bases, as far as known. `file` and
    `line`: the innermost Python frame's file, and what its source says there."""

    types: tuple[str, ...]
    file: str
    line: str

    @property
    def kind(self) -> ErrorKind:
        if not _PEER_LOST_TYPES.isdisjoint(self.types):
            return ErrorKind.PEER_LOST
        if self.types[0] != _NATIVE:
            return ErrorKind.RAISED
        if any(part in self.file for part in _ONLY_WAITS) or _WAITS.search(self.line):
            return ErrorKind.PEER_LOST
        return ErrorKind.UNCLEAR if any(part in self.file for part in _ALSO_WAITS) else ErrorKind.RAISED


def kind_of(error: BaseException) -> ErrorKind:
    """The kind of an exception at hand, with all that it was raised from or while handling."""
    chain = list(_chain(error))
    for each in chain:
        if isinstance(each, RelayedError):
            return ErrorKind(each.kind)
    if any(isinstance(each, ConfigRefusedError) for each in chain):
        return ErrorKind.MODEL
    return _least_of(map(_raising, chain))


def kind_in_text(callstack: str) -> ErrorKind:
    """The kind of an exception that Python has written as text, chained ones included (`traceback.format_exc`)."""
    return _least_of(_raisings(callstack))


def _least_of(chain: Iterable[Raising]) -> ErrorKind:
    """The kind furthest from an own error counts: an exception handler that fails after a peer was lost has that
    cause."""
    kinds = list(ErrorKind)
    return max((each.kind for each in chain), key=kinds.index, default=ErrorKind.RAISED)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        implicit = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or implicit


def _raising(error: BaseException) -> Raising:
    types = tuple(f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__)
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return Raising(types, frames[0].filename, frames[0].line or "") if frames else Raising(types, "", "")


_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<file>.*)", line \d+')


def _raisings(callstack: str) -> Iterator[Raising]:
    lines = iter(callstack.splitlines())
    for line in lines:
        if line != _HEADER:
            continue
        file = source = ""
        for inner in lines:
            if frame := _FRAME.match(inner):
                file, source = frame["file"], ""
            elif inner.startswith(" "):
                source = source or inner.strip()
            else:
                name = inner.partition(":")[0].strip()
                yield Raising((name if "." in name else f"builtins.{name}",), file, source)
                break
