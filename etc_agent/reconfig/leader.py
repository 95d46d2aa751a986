"""The leader's decisions: from everything that is known to the next action.

`decide` is a pure function of a `View`. So a new leader that reads the same records reaches the same decision, and
years of faults can be replayed in milliseconds. The states of a generation:

    (start, failure) -> fresh, committed at once: every worker is started afresh
    committed -> proposed -> armed -> committed: workers stay, their state migrates
                    |-> withdrawn (refused, too slow, preempted)
"""

from __future__ import annotations

from dataclasses import replace

from etc_agent.control.causes import ErrorKind
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation, Trigger
from etc_agent.parallel.topology import Placement
from etc_agent.planner.choose import NoConfigError
from etc_agent.planner.placing.placement import place
from etc_agent.reconfig.failures import names
from etc_agent.reconfig.following import follow
from etc_agent.reconfig.fresh_start import SIGTERM_EXIT_CODE, end, roles_of, start_fresh, store_on
from etc_agent.reconfig.known.records import Current, Outcome, Phase, Refusal, Reply, Request, Result, first_refusal
from etc_agent.reconfig.known.view import Decision, Describe, View, Wait, Write
from etc_agent.reconfig.loss.foresight import foresee
from etc_agent.reconfig.loss.losses import with_those_that_left
from etc_agent.reconfig.loss.recovery import handle, recover
from etc_agent.reconfig.proposals import with_stop_time
from etc_agent.reconfig.sizes.given_up import only_of_the_model, retry_in_s, with_refusal
from etc_agent.reconfig.sizes.requests import answer_meanwhile, is_starting, met, reply_to, take_up
from etc_agent.reconfig.sizes.sizing import (
    NotDescribed,
    PutOffError,
    check,
    impossible,
    in_session,
    is_met,
    meeting,
    target,
)
from etc_agent.reconfig.sizes.wanted import parse_wanted

_FIRST_STEP_S = 1.0
"""The longest that the first step after a loss is left alone."""


def decide(view: View) -> Decision:
    """The leader's next action. See the module docstring."""
    view = with_those_that_left(view)
    try:
        if view.current.outcome is not Outcome.RUNNING:
            return Wait()
        if view.stop is not None:
            why = ": ".join(filter(None, ("an administrator stopped it", str(view.stop))))
            return end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, why)
        if view.committed is None:
            return _start(view)
        if view.current.loss is not None:
            return answer_meanwhile(view, recover(view, view.committed, view.current.loss))
        if view.current.proposed:
            return follow(view, view.committed, view.generations[view.current.proposed])
        return _steady(view, view.committed)
    except NotDescribed as question:
        return Describe(question.config)


# ---- before the first generation ----------------------------------------------------------------------------------


def _start(view: View) -> Decision:
    policy = view.policy
    if policy.initial is not None and not view.current.wanted:
        view = replace(view, current=replace(view.current, wanted=str(policy.initial)))
    if view.scale and view.scale.revision > view.current.handled_scale:
        return _answer(view, view.scale)
    if view.nodes and view.live <= view.leaving:
        return end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, "every node was told to leave before the job started")
    if view.is_below_min:
        here = _too_few(view)
        if view.phase_s >= policy.below_min_s:
            return end(view, Outcome.FAILED, 1, f"{here} after {policy.below_min_s:g} s (timeouts.join_s)")
        return Wait(policy.below_min_s - view.phase_s, f"waiting for nodes: {here}")
    if len(view.usable) < policy.max_nodes:
        if view.quiet_s < policy.settle_s:
            return Wait(policy.settle_s - view.quiet_s)
    elif policy.initial is not None and (why := check(view, policy.initial)):
        return end(view, Outcome.FAILED, 1, f"the config to start with cannot be: {why}")
    return start_fresh(view, "start", Trigger.START)


def _without(view: View, committed: Generation, refusal: Refusal) -> Decision:
    """The model has refused the config it was started with: start with another, unless exactly that one was requested.

    The workers of `committed` are still running and are asked about the next candidate, so that no config is started
    that the model refuses too.
    """
    wanted = parse_wanted(view.current.wanted)
    if wanted == committed.config:
        return end(view, Outcome.FAILED, 1, refusal.error)
    acks = [view.ack(committed.id, node) for node in committed.nodes]
    are_all_there = not any(ack.failure for ack in acks) and not view.lost(committed.nodes)
    may_ask = are_all_there and view.phase_s < view.policy.start_s
    if may_ask and not in_session(view):
        return Wait(view.policy.start_s - view.phase_s)
    # That generation has made no progress, so any other config is better: treat the refusal as final.
    final = replace(refusal, kind=ErrorKind.MODEL)
    current = replace(with_refusal(view, committed.config, final), committed=0)
    without_it = replace(view, current=current)
    try:
        candidate = target(without_it, wanted)
    except NoConfigError:
        return start_fresh(without_it, refusal.error, Trigger.REFUSED)
    if may_ask and candidate not in view.descriptions and candidate not in view.undescribed:
        raise NotDescribed(candidate)
    return start_fresh(without_it, f"the model refuses the config before: {refusal.error}", Trigger.REFUSED)


# ---- a committed generation, none proposed --------------------------------------------------------------------------


def _steady(view: View, committed: Generation) -> Decision:
    acks = [view.ack(committed.id, node) for node in committed.nodes]
    if all(ack.finished for ack in acks):
        return end(view, Outcome.SUCCEEDED, 0, "every worker has finished")
    if not view.usable:
        return end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, "every node was told to leave")
    if committed.is_fresh and (refusal := first_refusal(ack.refusal for ack in acks if ack.refusal)):
        return _without(view, committed, refusal)
    if (write := with_stop_time(view, committed, acks)) is not None:
        return write
    if (decision := handle(view, committed, acks)) is not None:
        return answer_meanwhile(view, decision)
    if any(ack.finished for ack in acks):
        return Wait()
    if view.scale and view.scale.revision > view.current.handled_scale and not view.paused:
        return _answer(view, view.scale)
    if view.paused:
        return Wait()
    if committed.is_held and (decision := _hold(view, committed)) is not None:
        return decision
    if view.current.pending_scale and (why := impossible(view, parse_wanted(view.current.wanted))):
        # The request was accepted before the model could be asked.
        refused = Reply(view.current.wanted, view.current.pending_scale, Result.REFUSED, why)
        return Write(replace(view.current, wanted=view.current.wanted_before, pending_scale=0), reply=refused)
    is_reached = view.current.pending_scale and is_met(view, parse_wanted(view.current.wanted), committed)
    if is_reached and not is_starting(view, committed):
        done = met(view, committed, f"the job runs as {committed.config}")
        return Write(replace(view.current, pending_scale=0), reply=done)
    if (seconds := _first_step_due_s(view, committed)) > 0:
        return Wait(seconds)
    decision = _adjust(view, committed, view.current, None)
    return foresee(view, committed, decision) if isinstance(decision, Wait) else decision


def _first_step_due_s(view: View, committed: Generation) -> float:
    """For how long nothing is begun beside the first step after a loss, which everybody waits for: new processes, and
    questions about layouts, would take CPU from it."""
    if not committed.lost or not view.current.unreported or view.leaving:
        return 0.0
    return _FIRST_STEP_S - view.phase_s


def _hold(view: View, committed: Generation) -> Decision | None:
    """Keep the state in memory without training until enough nodes are present. None where they are, or where the state
    has to move to another node."""
    policy = view.policy
    if not view.is_below_min or any(node in view.leaving for node in committed.nodes):
        return None
    here = _too_few(view)
    if view.phase_s >= policy.below_min_s:
        why = f"{here}, and no more came in {policy.below_min_s:g} s (timeouts.join_s)"
        return end(view, Outcome.FAILED, 1, why)
    return Wait(policy.below_min_s - view.phase_s, f"the state is kept in memory and no step is run: {here}")


def _too_few(view: View) -> str:
    return f"{len(view.usable)} of at least {view.policy.min_nodes} nodes (--nnodes) are here"


def _adjust(view: View, committed: Generation, current: Current, reply: Reply | None) -> Decision:
    """Change the job to the wanted config on the nodes that stay, or only write `reply` where it has that config."""
    kept = Write(current, reply=reply) if reply else Wait(_next_try_s(view))
    leaving = [node for node in committed.nodes if node in view.leaving]
    try:
        config = target(view, parse_wanted(current.wanted))
    except NoConfigError as error:
        if not leaving:
            return kept
        if only_of_the_model(current) != current and not view.is_below_min:
            reason = f"{names(leaving)} leaves and its workers could not hand over their state"
            return start_fresh(replace(view, current=current), reason, Trigger.NODE_LEAVES)
        why = f"{names(leaving)} must leave, and the rest is too small: {error}"
        return end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, why)
    is_held = view.is_below_min and bool(leaving)
    if is_held and not in_session(view):
        why = f"{names(leaving)} must leave, and nnodes wants at least {view.policy.min_nodes}"
        return end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, why)
    if config == committed.config and not committed.is_held and not leaving:
        return kept
    if reply is None and not leaving and view.quiet_s < view.policy.settle_s:
        return Wait(view.policy.settle_s - view.quiet_s)
    if committed.is_held and (seconds := retry_in_s(view, config)) > 0:
        return Wait(seconds)  # it cannot stay as it is, but can wait for this
    reason, trigger = _reason(view, current, committed, config, leaving, is_held=is_held)
    if not in_session(view):
        is_plain = any(view.ack(committed.id, node).is_plain for node in committed.nodes)
        if view.phase_s < view.policy.start_s and not is_plain:
            return Write(current, reply=reply) if reply else Wait(view.policy.start_s - view.phase_s)
        decision = start_fresh(replace(view, current=current), reason, trigger)
        return replace(decision, reply=reply) if isinstance(decision, Write) else decision
    generation = Generation(
        current.next_id, config, placement := _placement(view, committed, config), store_on(view, placement[0].node),
        previous=committed.id, reason=reason, is_held=is_held, roles=roles_of(view, placement), trigger=trigger,
    )
    proposed = replace(current, proposed=generation.id, phase=Phase.PROPOSED, next_id=generation.id + 1)
    if reply is None and _is_asked_for(current, config):
        reply = Reply(current.wanted, current.pending_scale, Result.ACCEPTED, f"changing to {config}")
    return Write(proposed, generation=generation, reply=replace(reply, generation=generation.id) if reply else None)


def _next_try_s(view: View) -> float:
    """Seconds until a given-up config may be tried again."""
    pauses = [retry_in_s(view, ParallelConfig.parse(given_up.config)) for given_up in view.current.given_up]
    return min((seconds for seconds in pauses if seconds > 0), default=float("inf"))


def _placement(view: View, committed: Generation, config: ParallelConfig) -> Placement:
    layouts = []
    for described in (config, committed.config):
        layout = view.descriptions.get(described)
        if layout is None or isinstance(layout, str):
            raise NotDescribed(described)
        layouts.append(layout)
    usable = {node.name for node in view.usable}
    first = committed.placement[0]
    topology = view.topology
    sketch = place(
        layouts[0],
        view.slots,
        layouts[1],
        committed.placement,
        topology,
        group_size=config.tp,
        excluded=view.live - usable,
        pinned={0: first} if first.node in usable else {},
        pack=config.num_ranks < committed.config.num_ranks if view.policy.pack is None else view.policy.pack,
    )
    return sketch.placement


# ---- a request ----------------------------------------------------------------------------------------------------


def _answer(view: View, request: Request) -> Decision:
    current = take_up(view, request)
    if isinstance(current, Write):
        return current
    wanted = parse_wanted(request.text)

    def reply(result: Result, message: str) -> Reply:
        return reply_to(request, result, message)

    asked = replace(view, current=current)
    try:
        config = meeting(asked, wanted, view.num_usable_slots)
    except NoConfigError as error:
        waiting = str(error) if isinstance(error, PutOffError) else f"waiting for nodes: {error}"
        if view.committed is None:
            return Write(current, reply=reply(Result.PENDING, waiting))
        return _adjust(asked, view.committed, current, reply(Result.PENDING, waiting))
    if view.committed is None:
        return Write(current, reply=reply(Result.ACCEPTED, f"the job will start as {config}"))
    if view.committed.is_held and view.is_below_min:
        return Write(current, reply=reply(Result.PENDING, f"waiting for nodes: {_too_few(view)}"))
    if config == view.committed.config and not view.committed.is_held:
        done = reply(Result.DONE, f"the job already runs as {config}")
        return Write(replace(current, pending_scale=0), reply=replace(done, generation=view.committed.id))
    return _adjust(asked, view.committed, current, reply(Result.ACCEPTED, f"changing to {config}"))


# ---- texts --------------------------------------------------------------------------------------------------------


def _is_asked_for(current: Current, config: ParallelConfig) -> bool:
    """Whether `config` is a step towards a request that has not been met yet."""
    wanted = parse_wanted(current.wanted)
    if isinstance(wanted, ParallelConfig):
        return current.pending_scale > 0 and wanted == config
    return current.pending_scale > 0


def _reason(
    view: View, current: Current, committed: Generation, config: ParallelConfig, leaving: list[str], *, is_held: bool
) -> tuple[str, Trigger]:
    if _is_asked_for(current, config):
        return f"asked for {current.wanted}", Trigger.REQUEST
    if leaving:
        held = "; too few are left, the state is only kept" if is_held else ""
        return f"{names(leaving)} leaves{held}", Trigger.NODE_LEAVES
    if committed.is_held or config.num_ranks > committed.config.num_ranks:
        came = committed.is_held or not {node.name for node in view.usable} <= set(committed.nodes)
        return "nodes came" if came else "it grows to the wanted size", Trigger.NODES_CAME
    return "fewer slots are left", Trigger.FEWER_SLOTS
