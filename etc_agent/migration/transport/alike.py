"""Every worker's value, where many are alike: each distinct value travels once.

A prediction says which workers have the same value. The first worker of each predicted class sends its value to all;
every other worker compares. Only if one differs do all exchange digests, and the values that nobody has seen follow. A
wrong prediction costs bytes, nothing else.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from etc_agent.migration.transport.wire import Wire

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Alike:
    """`values`: the distinct ones. `class_of`: worker -> index of its value. `gathered_bytes`: what every worker has
    received of values and digests. `was_predicted`: no worker's value was another than predicted."""

    values: tuple[bytes, ...]
    class_of: tuple[int, ...]
    gathered_bytes: int
    was_predicted: bool


def gather_alike(
    wire: Wire, mine: bytes, predicted: Sequence[object], timeout: datetime.timedelta
) -> Alike:
    """Every worker's value; `mine` is this worker's. Collective.

    Args:
        predicted: worker -> anything hashable that is equal for workers which should have equal values; the same on
            every worker.

    Raises:
        RuntimeError: a worker was lost, or does not answer in time.
    """
    first: dict[object, int] = {}
    for worker, key in enumerate(predicted):
        first.setdefault(key, worker)
    number = {key: index for index, key in enumerate(first)}
    class_of = tuple(number[key] for key in predicted)
    values = _share(wire, list(first.values()), mine, timeout)
    differs = values[class_of[wire.rank]] != mine
    (is_wrong,) = wire.maximum([differs], timeout)
    gathered = sum(map(len, values))
    if not is_wrong:
        return Alike(tuple(values), class_of, gathered, was_predicted=True)
    rows = wire.all_gather(_as_tensor(_digest(mine)).to(wire.device), timeout)
    digests = [bytes(row.tolist()) for row in rows]
    known = {_digest(value): value for value in values}
    unknown = {digest: worker for worker, digest in reversed(list(enumerate(digests))) if digest not in known}
    senders = sorted(unknown.values())
    late = _share(wire, senders, mine, timeout)
    known.update({digests[sender]: value for sender, value in zip(senders, late, strict=True)})
    distinct = {digest: index for index, digest in enumerate(dict.fromkeys(digests))}
    gathered += _DIGEST_BYTES * len(digests) + sum(map(len, late))
    return Alike(
        tuple(known[digest] for digest in distinct), tuple(distinct[digest] for digest in digests), gathered,
        was_predicted=False,
    )


def _share(wire: Wire, senders: Sequence[int], mine: bytes, timeout: datetime.timedelta) -> list[bytes]:
    """The values of `senders`, on every worker."""
    if not senders:
        return []
    sizes = [0] * len(senders)
    if wire.rank in senders:
        sizes[senders.index(wire.rank)] = len(mine)
    sizes = wire.maximum(sizes, timeout)
    flat = torch.zeros(sum(sizes), dtype=torch.uint8)
    starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    if wire.rank in senders and mine:
        start = starts[senders.index(wire.rank)]
        flat[start : start + len(mine)] = _as_tensor(mine)
    # Every byte comes from one worker, and is zero on all others.
    whole = wire.total(flat.to(wire.device), timeout).cpu().numpy().tobytes() if len(flat) else b""
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()[:_DIGEST_BYTES]


def _as_tensor(value: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)
