"""Two decisions that end the present generation without a migration: a fresh start of all workers, or the job's end."""

from __future__ import annotations

from dataclasses import replace

from etc_agent.parallel.generation import Generation, Trigger
from etc_agent.parallel.topology import Placement, Slot, in_groups
from etc_agent.planner.choose import NoConfigError
from etc_agent.reconfig.failures import EndJob, FreshStart, Verdict, below_min, judge, names
from etc_agent.reconfig.known.records import Ack, History, Loss, Outcome, Phase, Reply, Result
from etc_agent.reconfig.known.view import Decision, View, Wait, Write, is_used, store_of
from etc_agent.reconfig.loss.offences import charged
from etc_agent.reconfig.sizes.given_up import only_of_the_model
from etc_agent.reconfig.sizes.sizing import is_met, target
from etc_agent.reconfig.sizes.wanted import parse_wanted

SIGTERM_EXIT_CODE = 143


def start_fresh(view: View, reason: str, trigger: Trigger) -> Decision:
    """Start every worker afresh on the usable nodes."""
    current = only_of_the_model(view.current)
    view = replace(view, current=current)
    if view.cordons and view.committed is not None:  # no worker stays, so no cordoned slot is used any longer
        everybody = Loss(0, tuple(map(str, view.committed.placement)), reason)
        view = replace(view, current=replace(current, loss=everybody))
    try:
        config = target(view, parse_wanted(current.wanted))
    except NoConfigError as error:
        return end(view, Outcome.FAILED, 1, f"no parallel config fits the {view.num_usable_slots} slots: {error}")
    slots = [tuple(Slot(node.name, index) for index in view.admitted(node)) for node in view.usable]
    placement = in_groups(slots, config.tp)[: config.num_ranks]
    host = placement[0].node
    store = store_on(view, host)
    if is_used(store, view.generations):  # its node is about to publish a new store
        return Wait(why=f"waiting for {names([host])} to open a new store")
    generation = Generation(
        current.next_id, config, placement, store, previous=0, reason=reason, roles=roles_of(view, placement),
        trigger=trigger,
    )
    next_current = replace(
        current, committed=generation.id, proposed=0, phase=Phase.IDLE, next_id=generation.id + 1, unreported=False,
        loss=None, fruitless=0, recovery_ms={},
    )
    started = History(
        generation.id, str(config), 0, reason, "committed", started=config.num_ranks,
        stopped=view.committed.config.num_ranks if view.committed else 0, trigger=trigger,
    )
    reply = None
    if current.pending_scale and not is_met(view, parse_wanted(current.wanted), generation):
        waiting = f"waiting for nodes: {reason}"
        reply = Reply(current.wanted, current.pending_scale, Result.PENDING, waiting, generation.id)
    return Write(next_current, generation=generation, reply=reply, history=started)


def lost_or_failed(view: View, committed: Generation, acks: list[Ack]) -> Decision | None:
    """The decision that lost nodes and the failures in `acks` require; None where there are none."""
    return carry_out(view, judge(view, committed, acks))


def carry_out(view: View, verdict: Verdict | None) -> Decision | None:
    """The decision that carries out a verdict."""
    match verdict:
        case FreshStart(current, reason, trigger, offenders):
            asked = replace(view, current=current)
            noted = charged(asked, Write(current), offenders)
            after = replace(asked, current=noted.current, cordons=(*view.cordons, *noted.cordons))
            decision = carry_out(view, below_min(view, reason)) or start_fresh(after, reason, trigger)
            return replace(decision, cordons=noted.cordons) if isinstance(decision, Write) else decision
        case EndJob(exit_code, why):
            return end(view, Outcome.FAILED, exit_code, why)
    return verdict


def end(view: View, outcome: Outcome, exit_code: int, why: str) -> Write:
    """End the job, and answer the request that is still pending, if any."""
    current, reply = view.current, None
    if current.pending_scale:
        message = f"the job {outcome}: {why}"
        reply = Reply(current.wanted, current.pending_scale, Result.REFUSED, message)
    ended = replace(current, outcome=outcome, exit_code=exit_code, why=why, proposed=0, pending_scale=0, loss=None)
    return Write(replace(ended, phase=Phase.IDLE), reply=reply)


def store_on(view: View, node: str) -> str:
    """The address of the store that a usable node offers."""
    (record,) = (record for record in view.nodes if record.name == node)
    return store_of(record)


def roles_of(view: View, placement: Placement) -> dict[str, str]:
    """The role (torchrun's ``--role``) of every node in `placement`."""
    members = {slot.node for slot in placement}
    return {node.name: node.role for node in view.nodes if node.name in members}
