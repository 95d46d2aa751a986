"""The leader's decisions: from all that is known to the next thing to do.

`decide` is a pure function of a `View`, so a new leader that reads the same records reaches the same decision, and
years of faults can be replayed in milliseconds. The life of a generation:

    (start, failure) -> fresh, committed at once: every worker starts anew
    committed -> proposed -> armed -> committed: workers stay, their state migrates
                    |-> withdrawn (refused, too slow, preempted)
"""

from __future__ import annotations

from dataclasses import replace

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Placement, Slot
from etc_agent.planner.choose import NoConfigError
from etc_agent.planner.placement import place
from etc_agent.reconfig.failures import GiveUp, StartAnew, Verdict, below_min, judge, names, without
from etc_agent.reconfig.records import (
    Ack,
    Current,
    History,
    Outcome,
    Phase,
    Reply,
    Request,
    Result,
    first_cause,
    slowest,
)
from etc_agent.reconfig.sizing import NotDescribed, check, in_session, meeting, target
from etc_agent.reconfig.view import Decision, Describe, View, Wait, Write, is_used, store_of
from etc_agent.reconfig.wanted import Largest, Wanted, parse_wanted

SIGTERM_EXIT_CODE = 143
_ASK_AGAIN_S = 10.0
"""After workers have refused to train on in the config that they hold."""
_MOST_SHOWN = 200
"""Characters of a request that are repeated to whoever made it."""


def decide(view: View) -> Decision:
    """The next thing for the leader to do. See the module's text."""
    try:
        if view.current.outcome is not Outcome.RUNNING:
            return Wait()
        if view.committed is None:
            return _start(view)
        if view.current.proposed:
            return _follow(view, view.committed, view.generations[view.current.proposed])
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
    if view.nodes and not view.usable:
        return _end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, "every node was told to leave before the job started")
    if view.is_below_min:
        here = _too_few(view)
        if view.phase_s >= policy.below_min_s:
            return _end(view, Outcome.FAILED, 1, f"{here} after {policy.below_min_s:g} s (timeouts.join_s)")
        return Wait(policy.below_min_s - view.phase_s, f"waiting for nodes: {here}")
    if len(view.usable) < policy.max_nodes and view.quiet_s < policy.settle_s:
        return Wait(policy.settle_s - view.quiet_s)
    return _fresh(view, "start")


def _without(view: View, committed: Generation, refusal: str) -> Decision:
    """The model has refused the config it was started with: try another, unless just that one was asked for."""
    if parse_wanted(view.current.wanted) == committed.config:
        return _end(view, Outcome.FAILED, 1, refusal)
    avoid = (*view.current.avoid, str(committed.config))
    # Nothing of that generation is worth staying with.
    return _fresh(replace(view, current=replace(view.current, avoid=avoid, committed=0)), refusal)


def _fresh(view: View, reason: str) -> Decision:
    """Start every worker anew on the usable nodes."""
    current = view.current
    try:
        config = target(view, parse_wanted(current.wanted))
    except NoConfigError as error:
        return _end(view, Outcome.FAILED, 1, f"no parallel config fits the {view.num_usable_slots} slots: {error}")
    slots = [Slot(node.name, index) for node in view.usable for index in range(node.num_slots)]
    store = _store(view, slots[0].node)
    if is_used(store, view.generations):  # its node is about to publish a new one
        return Wait(why=f"waiting for {names([slots[0].node])} to open a new store")
    generation = Generation(current.next_id, config, tuple(slots[: config.num_ranks]), store, previous=0, reason=reason)
    settled = replace(
        current, committed=generation.id, proposed=0, phase=Phase.IDLE, next_id=generation.id + 1, unreported=False
    )
    started = History(
        generation.id, str(config), 0, reason, "committed", started=config.num_ranks,
        stopped=view.committed.config.num_ranks if view.committed else 0,
    )
    reply = None
    if current.pending_scale and not _is_met(view, parse_wanted(current.wanted), generation):
        waiting = f"waiting for nodes: {reason}"
        reply = Reply(current.wanted, current.pending_scale, Result.PENDING, waiting, generation.id)
    return Write(settled, generation=generation, reply=reply, history=started)


# ---- a committed generation, nothing on its way -------------------------------------------------------------------


def _steady(view: View, committed: Generation) -> Decision:
    acks = [view.ack(committed.id, node) for node in committed.nodes]
    if all(ack.finished for ack in acks):
        return _end(view, Outcome.SUCCEEDED, 0, "every worker has finished")
    if not view.usable:
        return _end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, "every node was told to leave")
    if committed.is_fresh and (refusals := [ack.refused for ack in acks if ack.refused]):
        return _without(view, committed, refusals[0])
    if (decision := _lost_or_failed(view, committed, acks)) is not None:
        return decision
    if any(ack.finished for ack in acks):
        return Wait()
    if (history := _stop_time(view, committed, acks)) is not None:
        return Write(replace(view.current, unreported=False), history=history)
    if view.scale and view.scale.revision > view.current.handled_scale and not view.paused:
        return _answer(view, view.scale)
    if view.paused:
        return Wait()
    if committed.is_held and (decision := _hold(view, committed)) is not None:
        return decision
    if view.current.pending_scale and (why := check(view, parse_wanted(view.current.wanted))):
        # It was accepted before the model could be asked.
        refused = Reply(view.current.wanted, view.current.pending_scale, Result.REFUSED, why)
        return Write(replace(view.current, wanted=view.current.wanted_before, pending_scale=0), reply=refused)
    if view.current.pending_scale and _is_met(view, parse_wanted(view.current.wanted), committed):
        message = f"the job runs as {committed.config}"
        done = Reply(view.current.wanted, view.current.pending_scale, Result.DONE, message, committed.id)
        return Write(replace(view.current, pending_scale=0), reply=done)
    return _adjust(view, committed, view.current, None)


def _hold(view: View, committed: Generation) -> Decision | None:
    """The state is kept in memory until enough nodes are here; None where they are, or where it has to move."""
    policy = view.policy
    if not view.is_below_min or any(node in view.leaving for node in committed.nodes):
        return None
    here = _too_few(view)
    if view.phase_s >= policy.below_min_s:
        why = f"{here}, and no more came in {policy.below_min_s:g} s (timeouts.join_s)"
        return _end(view, Outcome.FAILED, 1, why)
    return Wait(policy.below_min_s - view.phase_s, f"the state is kept in memory and no step is run: {here}")


def _too_few(view: View) -> str:
    return f"{len(view.usable)} of at least {view.policy.min_nodes} nodes (--nnodes) are here"


def _adjust(view: View, committed: Generation, current: Current, reply: Reply | None) -> Decision:
    """Bring the job to the wanted config on the nodes that stay, or write just `reply` where it is there."""
    kept = Write(current, reply=reply) if reply else Wait()
    leaving = [node for node in committed.nodes if node in view.leaving]
    try:
        config = target(view, parse_wanted(current.wanted))
    except NoConfigError as error:
        if not leaving:
            return kept
        if current.avoid and not view.is_below_min:
            reason = f"{names(leaving)} leaves and its workers could not hand over their state"
            return _fresh(replace(view, current=replace(current, avoid=())), reason)
        why = f"{names(leaving)} must leave, and the rest is too small: {error}"
        return _end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, why)
    is_held = view.is_below_min and bool(leaving)
    if is_held and not in_session(view):
        why = f"{names(leaving)} must leave, and nnodes wants at least {view.policy.min_nodes}"
        return _end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, why)
    if config == committed.config and not committed.is_held and not leaving:
        return kept
    if reply is None and not leaving and view.quiet_s < view.policy.settle_s:
        return Wait(view.policy.settle_s - view.quiet_s)
    if committed.is_held and str(config) in current.avoid and view.phase_s < _ASK_AGAIN_S:
        return Wait(_ASK_AGAIN_S - view.phase_s)  # it cannot stay as it is, but there is no hurry
    reason = _reason(current, committed, config, leaving, is_held=is_held)
    if not in_session(view):
        is_plain = any(view.ack(committed.id, node).is_plain for node in committed.nodes)
        if view.phase_s < view.policy.start_s and not is_plain:
            return Write(current, reply=reply) if reply else Wait(view.policy.start_s - view.phase_s)
        decision = _fresh(replace(view, current=current), reason)
        return replace(decision, reply=reply) if isinstance(decision, Write) else decision
    generation = Generation(
        current.next_id, config, placement := _placement(view, committed, config), _store(view, placement[0].node),
        previous=committed.id, reason=reason, is_held=is_held,
    )
    proposed = replace(current, proposed=generation.id, phase=Phase.PROPOSED, next_id=generation.id + 1)
    if reply is None and _is_asked_for(current, config):
        reply = Reply(current.wanted, current.pending_scale, Result.ACCEPTED, f"changing to {config}")
    return Write(proposed, generation=generation, reply=replace(reply, generation=generation.id) if reply else None)


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
        topology.slots,
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
    current = replace(view.current, handled_scale=request.revision)
    shown = request.text if len(request.text) <= _MOST_SHOWN else request.text[:_MOST_SHOWN] + "..."

    def reply(result: Result, message: str) -> Reply:
        return Reply(shown, request.revision, result, message)

    try:
        wanted = parse_wanted(request.text)
    except ValueError as error:
        return Write(current, reply=reply(Result.REFUSED, str(error)))
    if why := check(view, wanted):
        return Write(current, reply=reply(Result.REFUSED, why))
    current = replace(
        current,
        wanted=request.text.strip(),
        wanted_before=view.current.wanted,
        pending_scale=request.revision,
        avoid=(),
    )
    asked = replace(view, current=current)
    try:
        config = meeting(asked, wanted, view.num_usable_slots)
    except NoConfigError as error:
        waiting = f"waiting for nodes: {error}"
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


# ---- a generation on its way --------------------------------------------------------------------------------------


def _follow(view: View, committed: Generation, proposed: Generation) -> Decision:
    nodes = tuple(dict.fromkeys((*committed.nodes, *proposed.nodes)))
    old = [view.ack(committed.id, node) for node in committed.nodes]
    new = [view.ack(proposed.id, node) for node in nodes]
    armed = view.current.phase is Phase.ARMED
    if (history := _stop_time(view, committed, old)) is not None:
        return Write(replace(view.current, unreported=False), history=history)
    if all(ack.finished for ack in old):
        return _end(view, Outcome.SUCCEEDED, 0, "every worker has finished")
    if all(ack.switched for ack in new):
        return _commit(view, committed, proposed, new)
    if not view.usable:
        return _end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, "every node was told to leave")
    joiner = first_cause(ack.failure for ack in new if ack.failure) if armed else None
    if joiner and not joiner.kind.is_hang and not any(ack.failure for ack in old):
        # Those of the committed generation say what came of it: they may train on as if nothing had been.
        counting = [*old, *(replace(ack, failure=None) for ack in new)]
    else:
        counting = old + new if armed else old
    if (decision := _lost_or_failed(view, committed, counting)) is not None:
        return decision
    if armed:
        if (missing := view.lost(nodes)) and (decision := _carry_out(view, without(view, missing))) is not None:
            return decision
        if refusals := [ack for ack in new if ack.refused]:
            # The migration was voted down, so nobody is in the new generation and nobody will be.
            why = f"{refusals[0].node}: {refusals[0].refused}"
            return _withdraw(view, proposed, f"{joiner.slot}: {joiner.error}" if joiner else why, give_up=True)
        if view.phase_s >= view.policy.switch_s:
            if joiner and (decision := _lost_or_failed(view, committed, old + new)) is not None:
                return decision
            limit = f"{view.policy.switch_s:g} s (timeouts.switch_s)"
            why = f"generation {proposed.id} was armed and did not switch in {limit}"
            return _end(view, Outcome.FAILED, 1, why)
        return Wait(view.policy.switch_s - view.phase_s)
    return _prepare(view, committed, proposed, old, new)


def _prepare(view: View, committed: Generation, proposed: Generation, old: list[Ack], new: list[Ack]) -> Decision:
    for ack in new:
        if ack.refused:
            return _withdraw(view, proposed, f"{ack.node} cannot take part: {ack.refused}", give_up=True)
        if ack.failure:
            return _withdraw(view, proposed, f"{ack.failure.slot}: {ack.failure.error}", give_up=True)
    if any(ack.finished for ack in old):
        return _withdraw(view, proposed, "the job is finishing", give_up=True)
    gone = [node for node in proposed.nodes if node not in view.live or node in view.leaving]
    gone += [ack.node for ack in new if ack.lost]
    if gone:
        return _withdraw(view, proposed, f"{names(gone)} left before it was ready", give_up=False)
    digests = {ack.prepared for ack in new}
    if "" not in digests:
        if len(digests) > 1:
            return _withdraw(view, proposed, "the workers computed different migration plans", give_up=True)
        return Write(replace(view.current, phase=Phase.ARMED))
    if view.phase_s >= view.policy.prepare_s:
        slow = [ack.node for ack in new if not ack.prepared]
        why = f"{names(slow)} was not ready within {view.policy.prepare_s:g} s (timeouts.prepare_s)"
        return _withdraw(view, proposed, why, give_up=True)
    return Wait(view.policy.prepare_s - view.phase_s)


def _withdraw(view: View, proposed: Generation, why: str, *, give_up: bool) -> Write:
    """Drop the proposed generation. With `give_up`, whoever wanted it is told no; else it is tried again."""
    current = replace(view.current, proposed=0, phase=Phase.IDLE)
    history = History(proposed.id, str(proposed.config), proposed.previous, proposed.reason, "withdrawn", why)
    reply = None
    if give_up:
        if current.pending_scale:
            reply = Reply(current.wanted, current.pending_scale, Result.REFUSED, why, proposed.id)
            current = replace(current, wanted=current.wanted_before, pending_scale=0)
        current = replace(current, avoid=tuple(dict.fromkeys((*current.avoid, str(proposed.config)))))
    return Write(current, reply=reply, history=history)


def _commit(view: View, committed: Generation, proposed: Generation, acks: list[Ack]) -> Write:
    before, after = set(committed.placement), set(proposed.placement)
    current = replace(
        view.current,
        committed=proposed.id,
        proposed=0,
        phase=Phase.IDLE,
        unreported=not proposed.is_held,
        wanted_before=view.current.wanted,
    )
    history = History(
        proposed.id, str(proposed.config), committed.id, proposed.reason, "committed",
        step=max(ack.step for ack in acks),
        kept=len(before & after), started=len(after - before), stopped=len(before - after),
        moved_bytes=sum(ack.received_bytes for ack in acks),
        phases_ms=slowest(ack.phases_ms for ack in acks),
        prepare_ms=slowest(ack.prepare_ms for ack in acks),
    )
    reply = None
    if current.pending_scale and _is_met(view, parse_wanted(current.wanted), proposed):
        message = f"the job runs as {proposed.config} from step {history.step}"
        reply = Reply(current.wanted, current.pending_scale, Result.DONE, message, proposed.id)
        current = replace(current, pending_scale=0)
    return Write(current, reply=reply, history=history)


def _is_met(view: View, wanted: Wanted, generation: Generation) -> bool:
    if generation.is_held:
        return False
    try:
        return isinstance(wanted, Largest) or meeting(view, wanted, view.num_usable_slots) == generation.config
    except NoConfigError:
        return False


def _stop_time(view: View, committed: Generation, acks: list[Ack]) -> History | None:
    """The committed generation's history once more, when every worker has ended its first step in it."""
    if not view.current.unreported or any(ack.stop_ms is None for ack in acks):
        return None
    previous = view.generations[committed.previous]
    nodes = dict.fromkeys((*previous.nodes, *committed.nodes))
    write = _commit(view, previous, committed, [view.ack(committed.id, node) for node in nodes])
    assert write.history is not None
    return replace(write.history, stop_ms=max(ack.stop_ms or 0.0 for ack in acks))


# ---- failures, and the end ---------------------------------------------------------------------------------------


def _lost_or_failed(view: View, committed: Generation, acks: list[Ack]) -> Decision | None:
    return _carry_out(view, judge(view, committed, acks))


def _carry_out(view: View, verdict: Verdict | None) -> Decision | None:
    match verdict:
        case StartAnew(current, reason):
            return _carry_out(view, below_min(view, reason)) or _fresh(replace(view, current=current), reason)
        case GiveUp(exit_code, why):
            return _end(view, Outcome.FAILED, exit_code, why)
    return verdict


def _end(view: View, outcome: Outcome, exit_code: int, why: str) -> Write:
    current, reply = view.current, None
    if current.pending_scale:
        message = f"the job {outcome}: {why}"
        reply = Reply(current.wanted, current.pending_scale, Result.REFUSED, message)
    ended = replace(current, outcome=outcome, exit_code=exit_code, why=why, proposed=0, pending_scale=0)
    return Write(replace(ended, phase=Phase.IDLE), reply=reply)


# ---- words --------------------------------------------------------------------------------------------------------


def _store(view: View, node: str) -> str:
    (record,) = (record for record in view.nodes if record.name == node)
    return store_of(record)


def _is_asked_for(current: Current, config: ParallelConfig) -> bool:
    """Whether `config` is a step towards a request that is yet to be met."""
    wanted = parse_wanted(current.wanted)
    if isinstance(wanted, ParallelConfig):
        return current.pending_scale > 0 and wanted == config
    return current.pending_scale > 0


def _reason(
    current: Current, committed: Generation, config: ParallelConfig, leaving: list[str], *, is_held: bool
) -> str:
    if _is_asked_for(current, config):
        return f"asked for {current.wanted}"
    if leaving:
        return f"{names(leaving)} leaves" + ("; too few are left, the state is only kept" if is_held else "")
    has_grown = committed.is_held or config.num_ranks > committed.config.num_ranks
    return "nodes came" if has_grown else "fewer slots are left"
