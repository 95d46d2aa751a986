"""How a proposed generation ends: committed or withdrawn, with its history and the answer to whoever asked for it."""

from __future__ import annotations

from dataclasses import replace

from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.records import Ack, History, Phase, Reply, Result, slowest
from etc_agent.reconfig.known.view import View, Write
from etc_agent.reconfig.sizes.given_up import forgetting
from etc_agent.reconfig.sizes.requests import met
from etc_agent.reconfig.sizes.sizing import is_met
from etc_agent.reconfig.sizes.wanted import parse_wanted


def withdraw(view: View, proposed: Generation, why: str) -> Write:
    """Withdraw the proposed generation, and tell whoever asked for it. Whether the request can still be met is decided
    when no generation is proposed."""
    current = replace(view.current, proposed=0, phase=Phase.IDLE)
    history = History(
        proposed.id, str(proposed.config), proposed.previous, proposed.reason, "withdrawn", why,
        trigger=proposed.trigger,
    )
    reply = None
    if current.pending_scale:
        reply = Reply(current.wanted, current.pending_scale, Result.PENDING, why, proposed.id)
    return Write(current, reply=reply, history=history)


def commit(view: View, committed: Generation, proposed: Generation, acks: list[Ack]) -> Write:
    """Record `proposed`, which every worker has entered, as committed. `acks`: of all nodes that took part."""
    before, after = set(committed.placement).difference(proposed.lost), set(proposed.placement)
    current = replace(
        view.current,
        committed=proposed.id,
        proposed=0,
        phase=Phase.IDLE,
        unreported=not proposed.is_held,
        wanted_before=view.current.wanted,
        given_up=forgetting(view.current, proposed.config).given_up,
    )
    history = History(
        proposed.id, str(proposed.config), committed.id, proposed.reason, "committed",
        step=max(ack.step for ack in acks),
        kept=len(before & after), started=len(after - before), stopped=len(before - after),
        moved_bytes=sum(ack.received_bytes for ack in acks),
        phases_ms={**view.current.recovery_ms, **slowest(ack.phases_ms for ack in acks)},
        prepare_ms=slowest(ack.prepare_ms for ack in acks),
        trigger=proposed.trigger,
    )
    reply = None
    if current.pending_scale and is_met(view, parse_wanted(current.wanted), proposed):
        reply = met(view, proposed, f"the job runs as {proposed.config} from step {history.step}")
        current = replace(current, pending_scale=0)
    return Write(current, reply=reply, history=history)


def with_stop_time(view: View, committed: Generation, acks: list[Ack]) -> Write | None:
    """The committed generation's history with its stop time, once every worker has completed its first step in it."""
    if not view.current.unreported or any(ack.stop_ms is None for ack in acks):
        return None
    previous = view.generations[committed.previous]
    nodes = dict.fromkeys((*previous.nodes, *committed.nodes))
    write = commit(view, previous, committed, [view.ack(committed.id, node) for node in nodes])
    assert write.history is not None
    current = replace(view.current, unreported=False, fruitless=0, recovery_ms={})
    return Write(current, history=replace(write.history, stop_ms=max(ack.stop_ms or 0.0 for ack in acks)))
