"""The leader's decisions while a proposed generation is being prepared: to arm, commit or withdraw it."""

from __future__ import annotations

from dataclasses import replace

from etc_agent.control.causes import ErrorKind
from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.failures import described, names, without
from etc_agent.reconfig.fresh_start import SIGTERM_EXIT_CODE, carry_out, end, lost_or_failed
from etc_agent.reconfig.known.records import Ack, Outcome, Phase, Refusal, first_cause, first_refusal
from etc_agent.reconfig.known.view import Decision, View, Wait, Write
from etc_agent.reconfig.loss.recovery import freeze_all, handle
from etc_agent.reconfig.proposals import commit, with_stop_time, withdraw
from etc_agent.reconfig.sizes.given_up import announced, with_refusal
from etc_agent.reconfig.sizes.requests import answer_meanwhile

_BY_THEMSELVES_S = 30.0
"""Seconds that the old workers have, after a worker that joins has died in an armed change, to find out by themselves
how the switch has ended; it may begin only when their step is over."""


def follow(view: View, committed: Generation, proposed: Generation) -> Decision:
    """The next decision about `proposed`, which is to replace `committed`."""
    nodes = tuple(dict.fromkeys((*committed.nodes, *proposed.nodes)))
    old = [view.ack(committed.id, node) for node in committed.nodes]
    new = [view.ack(proposed.id, node) for node in nodes]
    armed = view.current.phase is Phase.ARMED
    if (write := with_stop_time(view, committed, old)) is not None:
        return write
    if all(ack.finished for ack in old):
        return end(view, Outcome.SUCCEEDED, 0, "every worker has finished")
    if all(ack.switched for ack in new):
        return commit(view, committed, proposed, new)
    if not view.usable:
        return end(view, Outcome.STOPPED, SIGTERM_EXIT_CODE, "every node was told to leave")
    joiner = first_cause(ack.failure for ack in new if ack.failure) if armed else None
    if joiner and not joiner.kind.is_hang and not any(ack.failure for ack in old):
        # The old workers say how the switch ended: they may continue to train as if there had been none.
        counting = [*old, *(replace(ack, failure=None) for ack in new)]
    else:
        counting = old + new if armed else old
    if (decision := handle(view, committed, counting)) is not None:
        return answer_meanwhile(view, decision)
    if armed:
        missing = view.lost(nodes)
        if any(ack.refusal for ack in new):
            # The migration was voted down, so no worker is in the new generation and none will be.
            if missing:
                return withdraw(view, proposed, f"{names(missing)} was lost while it joined")
            return _refused(view, proposed, new)
        if missing:
            decision = freeze_all(view, committed, f"{names(missing)} was lost while it joined", missing)
            decision = decision or carry_out(view, without(view, missing))
            if decision is not None:
                return decision
        if joiner and view.failed_s >= _BY_THEMSELVES_S:
            # A message of the joiner that is half sent is waited for until somebody cuts the connection.
            decision = freeze_all(view, committed, described(view, joiner), [joiner.slot])
            if decision is not None:
                return decision
        if view.phase_s >= view.policy.switch_s:
            if joiner and (decision := lost_or_failed(view, committed, old + new)) is not None:
                return decision
            limit = f"{view.policy.switch_s:g} s (timeouts.switch_s)"
            why = f"generation {proposed.id} was armed and did not switch in {limit}"
            return end(view, Outcome.FAILED, 1, why)
        patient_s = _BY_THEMSELVES_S - view.failed_s if joiner else float("inf")
        return Wait(min(view.policy.switch_s - view.phase_s, patient_s if patient_s > 0 else float("inf")))
    return _prepare(view, committed, proposed, old, new)


def _prepare(view: View, committed: Generation, proposed: Generation, old: list[Ack], new: list[Ack]) -> Decision:
    gone = [node for node in proposed.nodes if node not in view.live or node in view.leaving]
    gone += [ack.node for ack in new if ack.lost]
    if gone:
        return withdraw(view, proposed, f"{names(gone)} left before it was ready")
    if any(ack.refusal or ack.failure for ack in new):
        return _refused(view, proposed, new)
    if any(ack.finished for ack in old):
        return withdraw(view, proposed, "the job is finishing")
    digests = {ack.prepared for ack in new}
    if "" not in digests:
        if len(digests) > 1:
            different = "the workers computed different migration plans"
            return _give_config_up(view, proposed, Refusal(str(proposed.placement[0]), ErrorKind.RAISED, different))
        return Write(replace(view.current, phase=Phase.ARMED))
    if view.phase_s >= view.policy.prepare_s:
        slow = [ack.node for ack in new if not ack.prepared]
        why = f"{names(slow)} was not ready within {view.policy.prepare_s:g} s (timeouts.prepare_s)"
        first = next(slot for slot in (*proposed.placement, *committed.placement) if slot.node == slow[0])
        return _give_config_up(view, proposed, Refusal(str(first), ErrorKind.RAISED, why))
    return Wait(view.policy.prepare_s - view.phase_s)


def _refused(view: View, proposed: Generation, acks: list[Ack]) -> Decision:
    """A worker has refused. If all that is known is that it lost a peer, wait for that peer's own refusal, or for the
    end of its node's lease."""
    refusals = [ack.refusal for ack in acks if ack.refusal] + [Refusal.of(ack.failure) for ack in acks if ack.failure]
    cause = first_refusal(refusals)
    assert cause is not None
    patience_s = view.policy.blame_s if len(acks) == 1 else max(view.policy.blame_s, view.policy.lost_s)
    if cause.kind in (ErrorKind.MODEL, ErrorKind.RAISED):
        patience_s = 0.0
    if view.refused_s < patience_s:
        return Wait(patience_s - view.refused_s)
    return _give_config_up(view, proposed, cause)


def _give_config_up(view: View, proposed: Generation, cause: Refusal) -> Write:
    """Withdraw the proposed generation because of `cause`, and record its config as given up."""
    given_up = replace(view, current=with_refusal(view, proposed.config, cause))
    return withdraw(given_up, proposed, f"{cause}{announced(given_up, proposed.config)}")
