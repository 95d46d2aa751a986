"""Rounds: which transfers are in flight together."""

from __future__ import annotations

from collections.abc import Iterable

from etc_agent.planner.plan import Transfer
from etc_agent.state.boxes import Box


def make_rounds(
    transfers: Iterable[Transfer], num_workers: int, *, round_bytes: int, round_transfers: int
) -> tuple[tuple[Transfer, ...], ...]:
    """Put each transfer into the earliest round in which both of its ends have room.

    In one round a worker sends at most `round_bytes`, receives at most `round_bytes` and takes part in at most
    `round_transfers` transfers. A transfer larger than `round_bytes` (a single element can be) is the only one of its
    round in that direction. A worker forwards in a later round than it has received. All transfers of a round are
    posted before any is waited for, and the rounds have the same order on every worker, so that no cycle of waits can
    occur.
    """
    transfers = list(transfers)
    forwarding = any(transfer.forwarded for transfer in transfers)
    rounds: list[list[Transfer]] = []
    sent: list[list[int]] = []
    received: list[list[int]] = []
    counts: list[list[int]] = []
    first_open = [0] * num_workers
    arrival: dict[tuple[int, str, Box], int] = {}
    for transfer in transfers:
        source, target, size = transfer.source, transfer.target, transfer.num_bytes
        number = max(first_open[source], first_open[target])
        if transfer.forwarded:
            number = max(number, arrival[source, transfer.tensor.name, transfer.box] + 1)
        while True:
            while number >= len(rounds):
                rounds.append([])
                sent.append([0] * num_workers)
                received.append([0] * num_workers)
                counts.append([0] * num_workers)
            count = counts[number]
            if (
                count[source] < round_transfers
                and count[target] < round_transfers
                and (not sent[number][source] or sent[number][source] + size <= round_bytes)
                and (not received[number][target] or received[number][target] + size <= round_bytes)
            ):
                break
            number += 1
        rounds[number].append(transfer)
        if forwarding:
            arrival[target, transfer.tensor.name, transfer.box] = number
        sent[number][source] += size
        received[number][target] += size
        counts[number][source] += 1
        counts[number][target] += 1
        for worker in (source, target):
            while (
                first_open[worker] < len(rounds)
                and (
                    counts[first_open[worker]][worker] >= round_transfers
                    or (
                        sent[first_open[worker]][worker] >= round_bytes
                        and received[first_open[worker]][worker] >= round_bytes
                    )
                )
            ):
                first_open[worker] += 1
    return tuple(tuple(transfers) for transfers in rounds)
