"""The rules of the torchrun rendezvous, as pure functions: who is present, who waits, who forms the next generation.

Every agent keeps a record under a lease, which exists while the agent lives. The roster is one key: the members of the
newest generation, in rank order. A node's record says after which generation it waits for another one. Once every
living member of the old roster waits as well, the node that registered first writes the next roster, by
compare-and-swap. Records are not changed while the workers run, except that a node which has lost its lease registers
again as busy.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etc_agent.rendezvous.etcd.values import KeyValue


class Ending(enum.StrEnum):
    """Why there will be no further generation."""

    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Node:
    """One agent's record. `arrival` orders nodes by when they registered; `node_rank` is what its user gave;
    `waits_after` is the generation after which it wants another one, None while its workers run; `store_port`: of an
    unused TCPStore."""

    name: str
    arrival: int
    address: str
    store_port: int
    node_rank: int | None
    waits_after: int | None

    def to_json(self) -> str:
        return json.dumps(
            {
                "address": self.address,
                "store_port": self.store_port,
                "node_rank": self.node_rank,
                "waits_after": self.waits_after,
            }
        )

    @staticmethod
    def from_key_value(name: str, kv: KeyValue) -> Node:
        record: dict[str, Any] = kv.json()
        return Node(
            name,
            kv.create_revision,
            record["address"],
            record["store_port"],
            record["node_rank"],
            record["waits_after"],
        )


@dataclass(frozen=True, slots=True)
class Roster:
    """One generation: its members in rank order; the first of them hosts the store."""

    generation: int = 0
    members: tuple[str, ...] = ()
    address: str = ""
    store_port: int = 0
    ending: Ending | None = None

    def to_json(self) -> str:
        return json.dumps(
            {
                "generation": self.generation,
                "members": self.members,
                "address": self.address,
                "store_port": self.store_port,
                "ending": self.ending,
            }
        )

    @staticmethod
    def from_key_value(kv: KeyValue) -> Roster:
        record: dict[str, Any] = kv.json()
        ending = record["ending"]
        return Roster(
            record["generation"],
            tuple(record["members"]),
            record["address"],
            record["store_port"],
            Ending(ending) if ending else None,
        )


@dataclass(frozen=True, slots=True)
class View:
    """What etcd holds at one revision. roster_revision: the roster key's mod_revision, 0 where there is none."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    roster: Roster = Roster()
    roster_revision: int = 0

    def is_waiting(self, node: Node) -> bool:
        if node.waits_after is None:
            return False
        return node.name not in self.roster.members or node.waits_after >= self.roster.generation

    @property
    def waiting(self) -> list[Node]:
        return [node for node in self.nodes.values() if self.is_waiting(node)]

    @property
    def live_members(self) -> list[Node]:
        """Members of the newest generation whose agents live, in rank order."""
        return [self.nodes[name] for name in self.roster.members if name in self.nodes]

    @property
    def newcomers(self) -> list[Node]:
        """Nodes that wait outside the newest generation, in order of arrival."""
        members = set(self.roster.members)
        return sorted((node for node in self.waiting if node.name not in members), key=lambda node: node.arrival)

    @property
    def is_everybody_waiting(self) -> bool:
        """Whether every living member of the newest generation waits for the next one."""
        return all(map(self.is_waiting, self.live_members))

    @property
    def scribe(self) -> Node | None:
        """The node that writes the next roster."""
        return min(self.waiting, key=lambda node: node.arrival, default=None)


def next_roster(view: View, max_nodes: int) -> Roster:
    """The next generation, of the nodes that wait now: members keep their order, newcomers follow in order of arrival,
    as many as fit; a node with a user-given rank gets that rank where it exists."""
    survivors = [node for node in view.live_members if view.is_waiting(node)]
    ordered = in_rank_order([*survivors, *view.newcomers][:max_nodes])
    first = ordered[0]
    return Roster(view.roster.generation + 1, tuple(node.name for node in ordered), first.address, first.store_port)


def in_rank_order(nodes: Iterable[Node]) -> list[Node]:
    """Nodes in rank order. A `node_rank` that is taken already, or beyond the last rank, puts the node near the end."""
    pool = list(nodes)
    seats: list[Node | None] = [None] * len(pool)
    rest: list[Node] = []
    for node in pool:
        rank = node.node_rank
        if rank is not None and rank < len(seats) and seats[rank] is None:
            seats[rank] = node
        else:
            rest.append(node)
    rest.sort(key=lambda node: -1 if node.node_rank is None else node.node_rank)  # stable: the others keep their order
    others = iter(rest)
    return [seat if seat is not None else next(others) for seat in seats]


def num_nodes_waiting(view: View, me: str, generation: int, max_nodes: int, *, are_newcomers_settled: bool) -> int:
    """How many nodes are a reason for member `me` of `generation` to stop its workers and meet again: members that died
    or are done with it, newcomers for whom there is room (at once where they fill the job, else when they have
    settled), or the fact that the others have already formed another generation.
    """
    roster = view.roster
    if roster.ending is Ending.FINISHED:
        return 0
    if roster.generation != generation:
        return 1
    others = [node for node in view.live_members if node.name != me]
    gone = len(roster.members) - 1 - len(others)
    done = sum(map(view.is_waiting, others))
    num_staying = 1 + len(others)
    joining = min(len(view.newcomers), max_nodes - num_staying)
    if roster.ending is Ending.FAILED:
        return gone + done
    if gone or done or are_newcomers_settled or num_staying + joining == max_nodes:
        return gone + done + joining
    return 0
