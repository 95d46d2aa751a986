"""Where the boxes of shared messages lie in a receiver's shared memory: told by the receiver to each sender."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from etc_agent.migration.schedule import Message, Schedule
from etc_agent.migration.transport.peers import Peers

Places = Mapping[tuple[int, int], tuple[int, ...]]
"""Peer and tag of a message that this worker sends -> where each of its boxes starts, in bytes."""

_TAG = (1 << 30) - 2


def tell_places(peers: Peers, schedule: Schedule, place_of: Callable[[Message], Sequence[int]]) -> Places:
    """Tell every neighbour where its messages go, and hear the same from those to which this worker sends.

    Args:
        place_of: a message that this worker receives -> where each of its boxes starts.

    Raises:
        MigrationError: a neighbour does not answer in time.
    """
    receives: dict[int, list[int]] = {}
    sends: dict[int, list[Message]] = {}
    for scheduled in schedule.rounds:
        for message in scheduled.receives:
            if message.shared:
                receives.setdefault(message.peer, []).extend(place_of(message))
        for message in scheduled.sends:
            if message.shared:
                sends.setdefault(message.peer, []).append(message)
    told = {peer: torch.tensor(starts, dtype=torch.int64) for peer, starts in receives.items()}
    heard = {
        peer: torch.empty(sum(len(message.transfers) for message in messages), dtype=torch.int64)
        for peer, messages in sends.items()
    }
    peers.exchange(told, heard, _TAG, "where its shared memory is")
    places: dict[tuple[int, int], tuple[int, ...]] = {}
    for peer, messages in sends.items():
        starts = iter(heard[peer].tolist())
        for message in messages:
            places[peer, message.tag] = tuple(next(starts) for _ in message.transfers)
    return places
