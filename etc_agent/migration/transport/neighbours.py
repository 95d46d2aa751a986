"""Neighbours: workers that share memory. Sharing is all-or-nothing per host: both ends must derive the same
messages."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etc_agent.migration.memory.memory_file import MemoryFile, describe, host_of, map_described
from etc_agent.migration.transport.bells import Bells
from etc_agent.migration.transport.peers import Peers
from etc_agent.planner.transfers.plan import MigrationPlan

Pair = tuple[int, int]
"""Source and target of transfers."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """`pairs`: all pairs of the plan that share memory. `mapped`: worker -> its memory, mapped here for writing.
    `bells`: the notification pipes between this worker and its neighbours."""

    pairs: frozenset[Pair] = frozenset()
    mapped: Mapping[int, ctypes.Array[ctypes.c_char]] = field(default_factory=dict)
    bells: Bells = field(default_factory=lambda: Bells(()))


def find_neighbours(
    plan: MigrationPlan,
    worker: int,
    peers: Peers,
    file: MemoryFile | None,
    *,
    wanted: bool,
) -> Neighbours:
    """Agree with every other worker on the plan and on who shares memory. Collective.

    Args:
        file: this worker's memory that others may write to; None for a worker that receives nothing.
        wanted: whether this worker is able to share memory.

    Raises:
        MigrationError: as for `Peers.agree`.
    """
    described = peers.agree(None, describe(file) if wanted else b"")
    hosts = [host_of(text) for text in described]
    pairs = pairs_of_hosts(plan, hosts)
    targets = {target for source, target in pairs if source == worker}
    mapped = {target: m for target in targets if (m := map_described(described[target])) is not None}
    partners = sorted({other for pair in pairs if worker in pair for other in pair} - {worker})
    bells = _bells_to(partners)
    doors = [json.loads(row) for row in peers.gather(json.dumps(bells.doors).encode())]
    opened = [str(worker) in doors[peer] and bells.open_to(peer, doors[peer][str(worker)]) for peer in bells.doors]
    did = len(mapped) == len(targets) and len(opened) == len(partners) and all(opened)
    failed = {host for host, answer in zip(hosts, peers.gather(bytes([did])), strict=True) if answer == b"\0"}
    bells.all_opened()
    if hosts[worker] in failed:
        bells.close()
    pairs = pairs_of_hosts(plan, ["" if host in failed else host for host in hosts])
    return Neighbours(pairs, {target: m for target, m in mapped.items() if (worker, target) in pairs}, bells)


def _bells_to(partners: Sequence[int]) -> Bells:
    """The bells to `partners`; bells to nobody where file descriptors run out."""
    try:
        return Bells(partners)
    except OSError:
        return Bells(())


def pairs_of_hosts(plan: MigrationPlan, hosts: Sequence[str]) -> frozenset[Pair]:
    """The pairs of the plan whose workers are on one host. Entry i of `hosts` is worker i's; "" matches no other
    host."""
    pairs = {(transfer.source, transfer.target) for transfers in plan.rounds for transfer in transfers}
    return frozenset((source, target) for source, target in pairs if hosts[source] and hosts[source] == hosts[target])
