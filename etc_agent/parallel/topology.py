"""Where workers can run: nodes and their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One accelerator position: a node and a local index on it. Written ``node/index``."""

    node: str
    index: int

    def __str__(self) -> str:
        return f"{self.node}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> Self:
        node, _, index = text.rpartition("/")
        if not node or not index.isdigit():
            raise ValueError(f"{text!r} is not a slot; write it like node-a/0")
        return cls(node, int(index))


Placement = tuple[Slot, ...]
"""Virtual rank -> slot."""


def node_numbers(slots: Sequence[Slot]) -> tuple[int, ...]:
    """Entry i: the number of the node of ``slots[i]``; nodes are numbered in the order of their first slot."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(slot.node for slot in slots))}
    return tuple(numbers[slot.node] for slot in slots)


@dataclass(frozen=True, slots=True)
class Node:
    """A host with `num_slots` slots and `num_nics` network interfaces of `nic_bytes_per_s` each.

    `shared_nics`: any slot may use every NIC of its node (striping); otherwise slot i is bound to NIC ``i % num_nics``.
    """

    name: str
    num_slots: int
    num_nics: int = 1
    nic_bytes_per_s: float = 12.5e9
    shared_nics: bool = True

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(self.name, index) for index in range(self.num_slots))


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a job, in their stable order."""

    nodes: tuple[Node, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for node in self.nodes for slot in node.slots)

    def slots_in_groups(self, size: int) -> tuple[Slot, ...]:
        """All slots as `in_groups` arranges them."""
        return in_groups([node.slots for node in self.nodes], size)

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise ValueError(f"no node {name!r}; there are {', '.join(node.name for node in self.nodes) or 'none'}")


def in_groups(nodes: Sequence[tuple[Slot, ...]], size: int) -> tuple[Slot, ...]:
    """All slots of `nodes`, those of one node beside each other, so that each `size` in turn are on one node as long as
    a node has room for so many. What is left over on the nodes comes last."""
    whole = [slot for slots in nodes for slot in slots[: len(slots) // size * size]]
    left_over = [slot for slots in nodes for slot in slots[len(slots) // size * size :]]
    return (*whole, *left_over)
