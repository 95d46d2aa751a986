"""Repeat offenders: slots whose workers fail, and nodes that are lost, again and again within a short time.

The leader writes a cordon for them, as an administrator would, with the reason; ``etc-ctl uncordon`` takes it back. No
cordon is written that would leave the job without a slot, or with fewer nodes than it may have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Current, Offence
from etc_agent.reconfig.known.view import View, Write
from etc_agent.reconfig.sizes.controls import Cordon, Order


def charged(view: View, write: Write, offenders: Iterable[str]) -> Write:
    """`write`, which follows from the failure of `offenders` (nodes, or slots written ``node/index``), with these
    failures noted and the cordons that they lead to."""
    policy = view.policy
    if not policy.max_per_window:
        return write
    recent = [each for each in write.current.offences if view.time - each.at < policy.window_s]
    recent += [Offence(name, view.time) for name in dict.fromkeys(offenders)]
    cordons: list[Cordon] = []
    for name in dict.fromkeys(each.name for each in recent):
        count = sum(each.name == name for each in recent)
        cordon = _cordon(name, Order(f"failed {count} times within {policy.window_s:g} s", "the leader", view.time))
        if count >= policy.max_per_window and _is_bearable(view, [*cordons, cordon]):
            cordons.append(cordon)
    names = {str(cordon) for cordon in cordons}
    kept = tuple(each for each in recent if each.name not in names)
    return replace(write, current=_with(write.current, kept), cordons=tuple(cordons))


def _with(current: Current, offences: tuple[Offence, ...]) -> Current:
    return current if offences == current.offences else replace(current, offences=offences)


def _cordon(name: str, order: Order) -> Cordon:
    if "/" not in name:
        return Cordon(name, None, order)
    slot = Slot.parse(name)
    return Cordon(slot.node, slot.index, order)


def _is_bearable(view: View, cordons: list[Cordon]) -> bool:
    """Whether enough is left of the present nodes, and whether the last of `cordons` is new."""
    if any(str(each) == str(cordons[-1]) for each in (*view.cordons, *cordons[:-1])):
        return False
    after = replace(view, cordons=(*view.cordons, *cordons))
    left = [node for node in view.nodes if node.name not in view.leaving and after.open_slots(node)]
    return len(left) >= max(1, view.policy.min_nodes)
