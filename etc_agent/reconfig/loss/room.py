"""Where the survivors of a loss can go on at once: their own slots, and those of warm spares.

A new process takes many times as long to start as all the rest of a recovery. So other slots are used only where no
config fits without them; the job grows back to its size afterwards, beside training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Node, Placement, Slot, Topology
from etc_agent.planner.choose import NoConfigError
from etc_agent.planner.placing.placement import place
from etc_agent.reconfig.known.view import View
from etc_agent.reconfig.loss.losses import survivors
from etc_agent.reconfig.sizes.sizing import NotDescribed, target
from etc_agent.reconfig.sizes.wanted import parse_wanted
from etc_agent.state.layout import Layout


@dataclass(frozen=True, slots=True)
class Room:
    """The best config, and the slots that it may use. `own`: those of survivors; `warm`: those with a warm spare."""

    config: ParallelConfig
    slots: tuple[Slot, ...]
    own: frozenset[Slot]
    warm: frozenset[Slot]

    def place(self, view: View, committed: Generation) -> Placement:
        """The placement; what was lost is nowhere, and rank 0 stays on its process if that has survived.

        Raises:
            NotDescribed: a layout has to be asked for first.
        """
        alive = frozenset(survivors(view, committed))
        current, before = (_layout(view, config) for config in (self.config, committed.config))
        previous = tuple(
            manifest if slot in alive else () for manifest, slot in zip(before, committed.placement, strict=True)
        )
        gone = dict.fromkeys(node for node in committed.nodes if node not in view.live)
        indices = [slot.index for slot in committed.placement]
        nodes = (*view.topology.nodes, *(Node(node, max(indices) + 1) for node in gone))
        first = committed.placement[0]
        return place(
            current, self.slots, previous, committed.placement, Topology(nodes),
            group_size=self.config.tp,
            pinned={0: first} if first in alive and first in self.slots else {},
            pack=bool(view.policy.pack),
        ).placement

    def described(self, placement: Placement) -> str:
        """Who goes on, for people."""
        new = [slot for slot in placement if slot not in self.own]
        if not new:
            return "the survivors go on"
        what = "warm spares" if set(new) <= self.warm else "new workers"
        return f"the survivors go on with {what} in {', '.join(map(str, new))}"


def find_room(view: View, committed: Generation) -> Room:
    """The best config for what the loss has left.

    Raises:
        NoConfigError: none fits.
        NotDescribed: the model has to be asked first.
    """
    nodes = {node.name: node for node in view.usable}
    own = frozenset(slot for slot in survivors(view, committed) if slot.node in nodes)
    every = frozenset(Slot(node.name, index) for node in nodes.values() for index in view.admitted(node))
    warm = frozenset(slot for slot in every - own if slot.index in nodes[slot.node].spares)
    try:
        return _fitting(view, own, warm, own | warm)
    except NoConfigError:
        return _fitting(view, own, warm, every | own)


def _fitting(view: View, own: frozenset[Slot], warm: frozenset[Slot], free: frozenset[Slot]) -> Room:
    counts = {node.name: sum(slot.node == node.name for slot in free) for node in view.usable}
    nodes = tuple(replace(node, num_slots=counts.get(node.name, 0)) for node in view.nodes)
    config = target(replace(view, nodes=nodes, cordons=()), parse_wanted(view.current.wanted))
    return Room(config, tuple(sorted(free)), own, warm)


def _layout(view: View, config: ParallelConfig) -> Layout:
    layout = view.descriptions.get(config)
    if layout is None or isinstance(layout, str):
        raise NotDescribed(config)
    return layout
