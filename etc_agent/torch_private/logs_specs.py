"""Which output of which local rank goes where, as a LogsSpecs keeps it from the options of torchrun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs, Std

NAMES = (
    "torch.distributed.elastic.multiprocessing.LogsSpecs._redirects",
    "torch.distributed.elastic.multiprocessing.LogsSpecs._tee",
    "torch.distributed.elastic.multiprocessing.LogsSpecs._local_ranks_filter",
)

ByRank = Std | dict[int, Std]
"""One for all local ranks, or one for each."""


@dataclass(frozen=True, slots=True)
class Streams:
    """`redirects`: to files; `tee`: to files and the console; `local_ranks`: whose output the console shows, None for
    all."""

    redirects: ByRank
    tee: ByRank
    local_ranks: Any


def streams_of(specs: LogsSpecs) -> Streams:
    return Streams(specs._redirects, specs._tee, specs._local_ranks_filter)


def set_streams(specs: LogsSpecs, redirects: ByRank, tee: ByRank) -> None:
    """Have `specs` send the streams elsewhere than its options said."""
    specs._redirects, specs._tee = redirects, tee
