"""The leader's decisions about a loss that the survivors handle in place: freeze, agree, form the next generation.

    lost -> frozen -> agreed -> proposed -> armed -> committed, and the loss is over
              ^-- more workers are lost, in any phase

docs/failures.md describes the protocol. What cannot be handled in place is a fresh start, with the reason in one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Frozen
from etc_agent.control.redundancy import Scheme
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.planner.choose import NoConfigError
from etc_agent.reconfig.failures import FreshStart, described, names
from etc_agent.reconfig.fresh_start import SIGTERM_EXIT_CODE, carry_out, end, lost_or_failed, roles_of, store_on
from etc_agent.reconfig.known.records import Ack, Agreement, Loss, Outcome, Phase, Refusal, first_refusal
from etc_agent.reconfig.known.view import Decision, View, Wait, Write
from etc_agent.reconfig.loss.losses import Lost, can_continue, instead, look, survivors, trigger_of
from etc_agent.reconfig.loss.offences import charged
from etc_agent.reconfig.loss.outlook import unheld_with_copies
from etc_agent.reconfig.loss.replicas import unheld
from etc_agent.reconfig.loss.room import find_room
from etc_agent.reconfig.proposals import commit, withdraw
from etc_agent.reconfig.sizes.given_up import with_refusal
from etc_agent.reconfig.sizes.sizing import NotDescribed

_UNDESCRIBED = "no worker could tell a layout within {:g} s (timeouts.prepare_s)"


def handle(view: View, committed: Generation, acks: list[Ack]) -> Decision | None:
    """What lost workers and nodes require, in place where that is possible; None where nothing is lost. `acks`: of
    every node whose workers belong to the job now."""
    if not can_continue(view, committed):
        return lost_or_failed(view, committed, acks)
    found = look(view, committed, acks)
    if not isinstance(found, Lost):
        return carry_out(view, found)
    return _begin(view, committed, acks, found)


def freeze_all(view: View, committed: Generation, why: str, offenders: Iterable[str]) -> Decision | None:
    """A worker that joins an armed generation was lost, and what became of that is to be found out: freeze all workers,
    none of which is lost. None where they cannot be frozen."""
    if not can_continue(view, committed):
        return None
    acks = [view.ack(committed.id, node) for node in committed.nodes]
    return _begin(view, committed, acks, Lost(view.current, (), why, tuple(offenders)))


def _begin(view: View, committed: Generation, acks: list[Ack], lost: Lost) -> Decision:
    """Record the loss, or that it has grown. A proposed generation that is not armed is withdrawn by the same write;
    of one that is armed, the survivors say what became of it."""
    current, before = lost.current, lost.current.loss
    slots = tuple(sorted({*lost.slots, *(before.slots if before else ())}))
    why = f"{before.why}; {lost.why}" if before and lost.why not in before.why else lost.why
    everything = replace(lost, slots=slots, why=why)
    if obstacle := _obstacle(view, committed, slots):
        return _instead(view, committed, acks, everything, obstacle)
    number = current.losses + 1
    loss = replace(before, number=number, slots=slots, why=why) if before else Loss(
        number, slots, why, trigger=trigger_of(view, slots)
    )
    proposed = view.generations.get(current.proposed)
    write = Write(current)
    if proposed is not None and current.phase is Phase.PROPOSED:
        write = withdraw(replace(view, current=current), proposed, why)
    return charged(view, replace(write, current=replace(write.current, loss=loss, losses=number)), lost.offenders)


def recover(view: View, committed: Generation, loss: Loss) -> Decision:
    """The next decision about `loss`."""
    current = view.current
    proposed = view.generations.get(current.proposed)
    is_agreed = loss.agreement is not None and loss.agreement.loss == loss.number
    nodes = tuple(dict.fromkeys((*committed.nodes, *(proposed.nodes if proposed else ()))))
    old = [view.ack(committed.id, node) for node in committed.nodes]
    new = [view.ack(proposed.id, node) for node in nodes] if proposed else []
    if proposed is not None and is_agreed and all(ack.switched for ack in _taking_part(proposed, committed, new)):
        return _commit(view, committed, proposed, loss, new)
    if not view.usable:
        return end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, "every node was told to leave")
    if (decision := handle(view, committed, old + new)) is not None:
        return decision
    if not is_agreed:
        return _agree(view, committed, proposed, loss)
    if proposed is None:
        return _propose(view, committed, loss, old)
    return _follow(view, committed, proposed, loss, _taking_part(proposed, committed, new))


def _taking_part(proposed: Generation, committed: Generation, acks: list[Ack]) -> list[Ack]:
    """The acknowledgements of the nodes with workers that survive or join."""
    slots = {*proposed.placement, *(slot for slot in committed.placement if slot not in proposed.lost)}
    nodes = {slot.node for slot in slots}
    return [ack for ack in acks if ack.node in nodes]


# ---- what cannot be handled in place ------------------------------------------------------------------------------


def _obstacle(view: View, committed: Generation, slots: tuple[str, ...]) -> str | None:
    """Why the survivors cannot go on without the workers in `slots`, as far as is known; None where they can. While a
    generation is armed it is not known yet what they hold."""
    if not survivors(view, committed, slots):
        return "no worker has survived"
    layout = view.descriptions.get(committed.config)
    if layout is None or isinstance(layout, str) or view.current.phase is Phase.ARMED:
        return None
    name = unheld_with_copies(layout, committed, view.policy.redundancy, _ranks(committed, slots))
    return f"nobody else holds {name} of {committed.config}" if name is not None else None


def _needs_copies(view: View, committed: Generation, slots: tuple[str, ...]) -> bool:
    """Whether only copies are left of what the workers in `slots` held.

    Raises:
        NotDescribed: a layout has to be asked for first.
    """
    if view.policy.redundancy.scheme is Scheme.NONE:
        return False
    layout = view.descriptions.get(committed.config)
    if layout is None or isinstance(layout, str):
        raise NotDescribed(committed.config)
    return unheld(layout, _ranks(committed, slots)) is not None


def _ranks(committed: Generation, slots: tuple[str, ...]) -> list[int]:
    return [rank for rank, slot in enumerate(committed.placement) if str(slot) in slots]


def _instead(view: View, committed: Generation, acks: list[Ack], lost: Lost, why: str) -> Decision:
    """Every worker has to be started afresh after all."""
    cleared = replace(view, current=replace(view.current, loss=None))
    verdict = instead(cleared, committed, acks, replace(lost, current=cleared.current), f"not handled in place: {why}")
    if isinstance(verdict, FreshStart) and view.current.loss is not None:
        verdict = replace(verdict, trigger=view.current.loss.trigger)
    decision = carry_out(cleared, verdict)
    assert decision is not None
    return decision


def _give_up(view: View, committed: Generation, loss: Loss, why: str) -> Decision:
    acks = [view.ack(committed.id, node) for node in committed.nodes]
    return _instead(view, committed, acks, Lost(view.current, loss.slots, loss.why), why)


# ---- frozen, agreed -----------------------------------------------------------------------------------------------


def _agree(view: View, committed: Generation, proposed: Generation | None, loss: Loss) -> Decision:
    """Once all survivors have frozen: write what they continue from."""
    alive = [*survivors(view, committed), *(_joiners(view, committed, proposed) if proposed else ())]
    if not alive:
        return _give_up(view, committed, loss, "no worker has survived")
    answers: dict[str, Frozen | None] = {slot.node: None for slot in alive}
    for node in answers:
        for generation in (committed, proposed):
            frozen = view.ack(generation.id, node).frozen if generation else None
            if frozen is not None and frozen.loss == loss.number:
                answers[node] = frozen
    if silent := [node for node, answer in answers.items() if answer is None]:
        return Wait(why=f"waiting for the workers on {names(silent)} to stop: {loss.why}")
    given = [answer for answer in answers.values() if answer is not None]
    broken = next((answer.broken for answer in given if answer.broken), "")
    loss = _timed(view, loss, "freeze")
    next_id = proposed.id if proposed else 0
    entered = [answer for answer in given if next_id and answer.generation == next_id]
    if proposed is not None and (entered or broken or _may_enter(view, proposed, given)):
        if any(next_id not in (answer.generation, answer.completed) for answer in given):
            why = broken or f"some workers are in generation {next_id}, and others cannot enter it"
            return _give_up(view, committed, loss, why)
        return _enter(view, committed, proposed, loss, given)
    if broken:
        return _give_up(view, committed, loss, broken)
    agreement = loss.agreement
    try:
        goes_back = (agreement is not None and agreement.from_copies) or _needs_copies(view, committed, loss.slots)
    except NotDescribed:
        if view.phase_s >= view.policy.prepare_s:
            return _give_up(view, committed, loss, _UNDESCRIBED.format(view.policy.prepare_s))
        raise
    if goes_back:
        copied = min((answer.copied for answer in given if answer.generation == committed.id), default=-1)
        if copied < 0:
            return _give_up(view, committed, loss, "only copies could replace what was lost, and none are complete yet")
        agreement = Agreement(committed.id, copied, from_copies=True)
    elif agreement is None:
        furthest = max(given, key=lambda answer: answer.step)
        agreement = Agreement(committed.id, furthest.step, furthest.ok)
    agreed = replace(loss, agreement=replace(agreement, loss=loss.number))
    write = Write(view.current)
    if proposed is not None:
        write = withdraw(view, proposed, loss.why)
    return replace(write, current=replace(write.current, loss=agreed))


def _joiners(view: View, committed: Generation, proposed: Generation) -> list[Slot]:
    """The slots of `proposed` with workers that join and live."""
    staying = set(committed.placement).difference(proposed.lost)
    failed = {failure.slot for node in proposed.nodes for failure in view.ack(proposed.id, node).failed}
    gone = {*view.lost(proposed.nodes), *(node for node in proposed.nodes if view.ack(proposed.id, node).lost)}
    return [
        slot
        for slot in proposed.placement
        if slot not in staying and str(slot) not in failed and slot.node not in gone
    ]


def _may_enter(view: View, proposed: Generation, given: list[Frozen]) -> bool:
    """Whether every worker of `proposed` lives and has completed the migration to it. Then they enter it: where old
    memory was released on the way, there is no way back."""
    has_failed = any(view.ack(proposed.id, node).failed for node in proposed.nodes)
    return not has_failed and all(answer.completed == proposed.id for answer in given)


def _enter(
    view: View, committed: Generation, proposed: Generation, loss: Loss, given: list[Frozen]
) -> Write:
    """Some worker has entered the armed generation, so all do; what is lost of that one is to be handled next."""
    furthest = max(given, key=lambda answer: (answer.generation, answer.step))
    acks = [view.ack(proposed.id, node) for node in dict.fromkeys((*committed.nodes, *proposed.nodes))]
    write = commit(view, committed, proposed, acks)
    assert write.history is not None
    failed = {failure.slot for ack in acks for failure in ack.failed}
    gone = {*view.lost(proposed.nodes), *(ack.node for ack in acks if ack.lost)}
    slots = tuple(sorted(str(slot) for slot in proposed.placement if str(slot) in failed or slot.node in gone))
    agreement = Agreement(proposed.id, max(answer.step for answer in given), furthest.ok, loss.number)
    current = replace(write.current, loss=replace(loss, slots=slots, agreement=agreement))
    return replace(write, current=current, history=replace(write.history, step=agreement.step))


# ---- the next generation ------------------------------------------------------------------------------------------


def _propose(view: View, committed: Generation, loss: Loss, acks: list[Ack]) -> Decision:
    """Propose the generation in which the survivors go on."""
    policy = view.policy
    if obstacle := _obstacle(view, committed, loss.slots):
        return _give_up(view, committed, loss, obstacle)
    if view.is_below_min:
        here = f"{len(view.usable)} of at least {policy.min_nodes} nodes (--nnodes) are here"
        if view.phase_s >= policy.below_min_s:
            why = f"{loss.why}; {here}, and no more came in {policy.below_min_s:g} s (timeouts.join_s)"
            return end(view, Outcome.FAILED, 1, why)
        return Wait(policy.below_min_s - view.phase_s, f"the state is kept in memory and no step is run: {here}")
    if view.phase_s >= policy.prepare_s:
        return _give_up(view, committed, loss, _UNDESCRIBED.format(policy.prepare_s))
    try:
        room = find_room(view, committed)
    except NoConfigError as error:
        return _give_up(view, committed, loss, f"no parallel config fits what is left: {error}")
    placement = room.place(view, committed)
    if obstacle := _obstacle(view, committed, loss.slots):  # the layout may have become known only now
        return _give_up(view, committed, loss, obstacle)
    lost = tuple(slot for slot in committed.placement if str(slot) in loss.slots)
    generation = Generation(
        view.current.next_id, room.config, placement, store_on(view, placement[0].node),
        previous=committed.id, reason=f"{loss.why}; {room.described(placement)}{_from_where(loss)}",
        roles=roles_of(view, placement), lost=lost, trigger=loss.trigger,
    )
    current = replace(
        view.current, proposed=generation.id, phase=Phase.PROPOSED, next_id=generation.id + 1,
        loss=_timed(view, loss, "decide"),
    )
    return Write(current, generation=generation)


def _from_where(loss: Loss) -> str:
    """For people, where the survivors go back further than the step that was under way."""
    agreement = loss.agreement
    return f", from the copies of step {agreement.step}" if agreement is not None and agreement.from_copies else ""


def _follow(view: View, committed: Generation, proposed: Generation, loss: Loss, acks: list[Ack]) -> Decision:
    """The next decision about the generation in which the survivors are to go on."""
    policy = view.policy
    is_armed = view.current.phase is Phase.ARMED
    refusals = [ack.refusal for ack in acks if ack.refusal]
    ended = [failure for ack in acks for failure in ack.failed if not failure.kind.is_hang]
    if refusals or (ended and not is_armed):
        return _refused(view, proposed, refusals + [Refusal.of(failure) for failure in ended])
    missing = view.lost(proposed.nodes)
    if is_armed and (ended or missing):
        # Whether others have entered the generation before, only they can say.
        why = described(view, ended[0]) if ended else f"{names(missing)} was lost while it joined"
        decision = freeze_all(view, committed, why, [*(failure.slot for failure in ended), *missing])
        assert decision is not None
        return decision
    joining = [node for node in proposed.nodes if node not in view.live or node in view.leaving]
    if joining and view.current.phase is Phase.PROPOSED:
        return withdraw(view, proposed, f"{names(joining)} left before it was ready")
    digests = {ack.prepared for ack in acks}
    if view.current.phase is Phase.PROPOSED and "" not in digests:
        if len(digests) > 1:
            return _give_up(view, committed, loss, "the workers computed different migration plans")
        return Write(replace(view.current, phase=Phase.ARMED, loss=_timed(view, loss, "prepare")))
    limit_s, name = (policy.switch_s, "switch_s") if is_armed else (policy.prepare_s, "prepare_s")
    if view.phase_s >= limit_s:
        slow = names(ack.node for ack in acks if not (ack.switched if is_armed else ack.prepared))
        return _give_up(view, committed, loss, f"{slow} was not ready within {limit_s:g} s (timeouts.{name})")
    return Wait(limit_s - view.phase_s)


def _refused(view: View, proposed: Generation, refusals: list[Refusal]) -> Decision:
    """A worker cannot take part in `proposed`: try another config, after time for a better explanation."""
    cause = first_refusal(refusals)
    assert cause is not None
    is_its_own = cause.kind in (ErrorKind.MODEL, ErrorKind.RAISED)
    if not is_its_own and view.refused_s < view.policy.blame_s:
        return Wait(view.policy.blame_s - view.refused_s)
    without_it = replace(view, current=with_refusal(view, proposed.config, cause))
    return withdraw(without_it, proposed, str(cause))


def _commit(view: View, committed: Generation, proposed: Generation, loss: Loss, acks: list[Ack]) -> Write:
    write = commit(view, committed, proposed, acks)
    assert write.history is not None
    phases_ms = {**_timed(view, loss, "switch").phases_ms, **write.history.phases_ms}
    current = replace(
        write.current, loss=None, fruitless=view.current.fruitless + 1,
        recovery_ms=_timed(view, loss, "switch").phases_ms,
    )
    return replace(write, current=current, history=replace(write.history, phases_ms=phases_ms))


def _timed(view: View, loss: Loss, phase: str) -> Loss:
    """`loss` with the milliseconds of the phase that ends now."""
    return replace(loss, phases_ms={**loss.phases_ms, phase: round(1e3 * view.phase_s, 1)})
