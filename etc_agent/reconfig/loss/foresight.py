"""Layouts that a recovery would need, asked for while nothing else goes on, so that no recovery waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.planner.choose import NoConfigError
from etc_agent.reconfig.known.records import Loss
from etc_agent.reconfig.known.view import Foresee, View, Wait
from etc_agent.reconfig.loss.losses import can_continue
from etc_agent.reconfig.loss.outlook import unheld_with_copies
from etc_agent.reconfig.loss.room import find_room
from etc_agent.reconfig.sizes.sizing import NotDescribed


def foresee(view: View, committed: Generation, wait: Wait) -> Foresee | Wait:
    """`wait`, with the configs whose layouts the loss of any one worker or node would need and that are not known."""
    if committed.is_held or view.current.unreported or not can_continue(view, committed):
        return wait
    if committed.config not in view.descriptions:
        return Foresee((committed.config,), wait)
    layout = view.descriptions[committed.config]
    wanted: dict[ParallelConfig, None] = {}
    for lost, after in _losses(view, committed):
        config = _needed(after, committed)
        if config is None or config in wanted or isinstance(layout, str):
            continue
        ranks = [committed.placement.index(slot) for slot in lost]
        if unheld_with_copies(layout, committed, view.policy.redundancy, ranks) is None:
            wanted[config] = None
    return Foresee(tuple(wanted), wait) if wanted else wait


def _losses(view: View, committed: Generation) -> Iterator[tuple[tuple[Slot, ...], View]]:
    """Each loss of one worker or of one node, with the view after it; of those that leave equally many slots, one."""
    of_node = {node: tuple(slot for slot in committed.placement if slot.node == node) for node in committed.nodes}
    seen: set[tuple[int, ...]] = set()
    for node, slots in of_node.items():
        for lost, is_node in (((slots[0],), False), (slots, True)):
            left = {name: len(others) for name, others in of_node.items()}
            left[node] -= len(lost)
            key = (int(is_node), *sorted(left.values()))
            if key in seen or sum(left.values()) == 0:
                continue
            seen.add(key)
            nodes = tuple(record for record in view.nodes if not is_node or record.name != node)
            loss = Loss(view.current.losses + 1, tuple(map(str, lost)), "")
            yield lost, replace(view, nodes=nodes, current=replace(view.current, loss=loss))


def _needed(after: View, committed: Generation) -> ParallelConfig | None:
    """The config whose layout is needed next to recover from a loss; None where all are known, or none fits."""
    try:
        config = find_room(after, committed).config
    except NotDescribed as question:
        config = question.config
    except NoConfigError:
        return None
    return None if config in after.descriptions or config in after.undescribed else config
