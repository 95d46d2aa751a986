"""A generation: one agreed (members, parallel config, placement), numbered 1, 2, 3 ..."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Placement, Slot


class Trigger(StrEnum):
    """Why a generation was made, as one of a few kinds; `Generation.reason` says it in full, for people.

    `START`: the job began. `REQUEST`: by `control/scale`. `NODES_CAME`: the job grew towards the wanted size.
    `NODE_LEAVES`: a node was told to leave. `FEWER_SLOTS`: of those that it wants fewer are there. `REFUSED`: the model
    refused the config before. The others are losses: of a node, of a worker that raised an error, was killed by a
    signal, hung, or ended in an unclear way, and of a connection between workers that all live.
    """

    START = "start"
    REQUEST = "request"
    NODES_CAME = "nodes_came"
    NODE_LEAVES = "node_leaves"
    FEWER_SLOTS = "fewer_slots"
    REFUSED = "refused"
    NODE_LOST = "node_lost"
    WORKER_RAISED = "worker_raised"
    WORKER_KILLED = "worker_killed"
    WORKER_HUNG = "worker_hung"
    WORKER_ENDED = "worker_ended"
    CONNECTION_LOST = "connection_lost"

    @property
    def is_loss(self) -> bool:
        return self in _LOSSES


_LOSSES = frozenset({
    Trigger.NODE_LOST, Trigger.WORKER_RAISED, Trigger.WORKER_KILLED, Trigger.WORKER_HUNG, Trigger.WORKER_ENDED,
    Trigger.CONNECTION_LOST,
})


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation, as it is written once to ``generations/<id>``.

    `placement`: virtual rank -> slot. `store`: ``host:port`` of the TCPStore that this generation meets at, under the
    prefix ``gen<id>``. `previous`: the generation whose state is migrated, or 0 for a fresh generation.
    `reason`: for people; `trigger`: its kind. `is_held`: too few nodes are left to train; workers keep the state and
    run no step. `roles`: node -> its role, torchrun's ``--role``; nodes that are not in it all have one role. `lost`:
    slots of `previous` whose workers are gone, with what they held; a new worker may join in such a slot.
    """

    id: int
    config: ParallelConfig
    placement: Placement
    store: str
    previous: int
    reason: str = ""
    is_held: bool = False
    roles: Mapping[str, str] = field(default_factory=dict, hash=False)
    lost: tuple[Slot, ...] = ()
    trigger: Trigger = Trigger.START

    def __post_init__(self) -> None:
        if len(self.placement) != self.config.num_ranks:
            raise ValueError(f"{self.config} has {self.config.num_ranks} ranks, the placement {len(self.placement)}")
        if len(set(self.placement)) != len(self.placement):
            raise ValueError(f"the placement of generation {self.id} gives one slot to two ranks")
        if self.is_held and self.is_fresh:
            raise ValueError(f"generation {self.id} has no state that it could hold")

    @property
    def is_fresh(self) -> bool:
        """Whether all worker processes are started for it, as under torchrun, and nothing is migrated."""
        return self.previous == 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the placement, each once, in the order of their first virtual rank."""
        return tuple(dict.fromkeys(slot.node for slot in self.placement))

    def role_mates(self, slot: Slot) -> tuple[Slot, ...]:
        """The slots of all workers whose role is that of the worker in `slot`, in the order of their ranks: what
        ROLE_RANK and ROLE_WORLD_SIZE count."""
        role = self.roles.get(slot.node)
        return tuple(other for other in self.placement if self.roles.get(other.node) == role)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "config": str(self.config),
            "placement": [str(slot) for slot in self.placement],
            "store": self.store,
            "previous": self.previous,
            "reason": self.reason,
            "is_held": self.is_held,
            "roles": dict(self.roles),
            "lost": [str(slot) for slot in self.lost],
            "trigger": self.trigger,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(
            id=value["id"],
            config=ParallelConfig.parse(value["config"]),
            placement=tuple(Slot.parse(text) for text in value["placement"]),
            store=value["store"],
            previous=value["previous"],
            reason=value["reason"],
            is_held=value.get("is_held", False),
            roles=value.get("roles", {}),
            lost=tuple(Slot.parse(text) for text in value.get("lost", ())),
            trigger=Trigger(value.get("trigger", Trigger.START)),
        )
