"""Whether workers are lost without which the others can go on: what has to be known before anything is decided.

A worker that raises an error of its own is the job's failure, not a loss (unless the job file says so). All other
deaths, nodes that are certainly gone, and hangs are losses. So is a connection that was cut while every worker lives:
nobody is lost then, and all form new groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from etc_agent.parallel.generation import Generation, Trigger
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.failures import (
    OF_OTHERS,
    TRIGGERS,
    FreshStart,
    Verdict,
    after_failure,
    described,
    names,
    over_budget,
    patience_s,
)
from etc_agent.reconfig.known.parts import base_of
from etc_agent.reconfig.known.records import Ack, Current, Failure, FailureKind, Refusal, first_cause, first_refusal
from etc_agent.reconfig.known.view import View, Wait

_MOST_NAMES = 3
_SUSPENSE_S = 1.0
"""Much longer than it takes to learn of a worker that has ended on a node that lives."""
_FREE = 2
"""Recoveries in a row without a completed step between them that do not count as restarts: two faults may come soon
after each other."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The workers in `slots` are lost, and the others can go on without them. `current`: the record with what this
    counts for. No slots: all workers live, and a connection between them was cut. `offenders`: the slots and nodes that
    caused it, by name."""

    current: Current
    slots: tuple[str, ...]
    why: str
    offenders: tuple[str, ...] = ()


def with_those_that_left(view: View) -> View:
    """`view` with the failures of workers that have exited with code 0 out of an open session, as far as the others
    miss them: an operation with one of them has failed, or a loss is being handled. Where nobody does, all come to
    the script's end in this way."""
    committed = view.current.committed
    acks = {key: ack for key, ack in view.acks.items() if key[0] == committed}
    disturbed = any(ack.peer_lost or any(each.kind in OF_OTHERS for each in ack.failed) for ack in acks.values())
    if view.current.loss is None and not disturbed:
        return view
    missed = {key: _with_failures(ack) for key, ack in acks.items() if ack.left}
    return replace(view, acks={**view.acks, **missed}) if missed else view


def _with_failures(ack: Ack) -> Ack:
    why = "it ended with exit code 0 before its session was closed, and the others still needed it"
    failed = (*ack.failed, *(Failure(slot, FailureKind.SILENT, 1, why) for slot in ack.left))
    return replace(ack, failed=failed, failure=first_cause(failed), finished=False)


def can_continue(view: View, committed: Generation) -> bool:
    """Whether the workers of `committed` can go on without some of them: every one has opened a session, and none has
    come to the script's end."""
    first = view.generations[base_of(committed, view.generations)]
    if not all(view.ack(first.id, node).in_session for node in first.nodes):
        return False
    return not any(view.ack(committed.id, node).ended for node in committed.nodes)


def survivors(view: View, committed: Generation, lost: Iterable[str] = ()) -> tuple[Slot, ...]:
    """The slots of `committed` whose workers are neither known to be lost nor in `lost`."""
    gone = {*(view.current.loss.slots if view.current.loss else ()), *lost}
    return tuple(slot for slot in committed.placement if str(slot) not in gone)


def look(view: View, committed: Generation, acks: list[Ack]) -> Lost | Verdict | None:
    """What has been lost of `committed` beyond what is known already; a verdict where that is not for the survivors to
    handle, or not clear yet; None where nothing is. `acks`: of every node whose workers belong to the job now."""
    alive = survivors(view, committed)
    here = {str(slot) for slot in alive}
    failed = {failure.slot: failure for ack in acks for failure in ack.failed if failure.slot in here}
    ended = {slot: failure for slot, failure in failed.items() if not failure.kind.is_hang}
    raised = first_cause(failure for failure in ended.values() if failure.kind is FailureKind.RAISED)
    if raised is not None and not view.policy.replaces_raised:
        return after_failure(view, raised, acks)
    members = tuple(dict.fromkeys(slot.node for slot in alive))
    missing = [*view.lost(members), *dict.fromkeys(ack.node for ack in acks if ack.lost and ack.node in view.live)]
    on_missing = [str(slot) for slot in alive if slot.node in missing]
    certain = [failure for failure in ended.values() if failure.kind in _CERTAIN]
    if on_missing or certain:
        cause = first_cause(certain)
        why = described(view, cause) if cause else f"{names(dict.fromkeys(missing))} was lost"
        offenders = (*dict.fromkeys(missing), *(each.slot for each in certain if each.slot not in on_missing))
        return _counted(view, Lost(view.current, tuple(sorted({*on_missing, *ended})), why, offenders), raised)
    absent = [node for node in members if node not in view.live]
    if absent:
        # The node may come back. Until it is certainly lost, its workers could meet those of the next generation.
        seconds = max(view.policy.lost_s - view.connected_s, *map(view.fenced_in_s, absent))
        return Wait(seconds, f"the lease of {names(absent)} is over; waiting until its workers must have stopped")
    return _by_appearance(view, committed, acks, failed)


_CERTAIN = (FailureKind.RAISED, FailureKind.KILLED, FailureKind.SILENT)
"""Of these it does not matter what else is found out: the worker is gone, and not because of another's loss."""


def _by_appearance(
    view: View, committed: Generation, acks: list[Ack], failed: dict[str, Failure]
) -> Lost | Verdict | None:
    """Workers that hang, or that were disturbed by another's failure, which is still to be found."""
    loss = view.current.loss
    cause = first_cause(failure for failure in failed.values() if loss is None or not failure.kind.is_hang)
    if cause is not None:
        patient_s = patience_s(view.policy, cause.kind, len(committed.nodes))
        if view.failed_s < patient_s:
            return Wait(patient_s - view.failed_s)
        if cause.kind is FailureKind.WAITING:
            return _cut(view, acks, cause, described(view, cause))
        slots = tuple(sorted(_ended(failed)) or [cause.slot])
        offenders = () if cause.kind in OF_OTHERS else (cause.slot,)
        return _counted(view, Lost(view.current, slots, described(view, cause), offenders))
    if loss is not None and (loss.agreement is None or loss.agreement.loss != loss.number):
        return None  # all are being frozen, whatever they have noticed
    # Of a loss that is being handled these messages are known; a later generation's are new.
    new = [ack for ack in acks if loss is None or ack.generation > committed.id]
    told = first_refusal(ack.peer_lost for ack in new if ack.peer_lost)
    if told is None:
        return None
    joiner = first_cause(failure for ack in new for failure in ack.failed if not failure.kind.is_hang)
    patient_s = view.policy.blame_s if len(committed.nodes) == 1 else max(view.policy.blame_s, view.policy.lost_s)
    if joiner is None and view.failed_s < min(patient_s, _SUSPENSE_S):
        return Wait(min(patient_s, _SUSPENSE_S) - view.failed_s)
    if joiner is None and view.failed_s < patient_s:
        return Wait(patient_s - view.failed_s, _in_suspense(committed, acks, told, patient_s))
    if joiner is not None:
        return Lost(view.current, (), described(view, joiner))
    failure = Failure(told.slot, FailureKind.PEER_LOST, 1, told.error)
    return _cut(view, acks, failure, f"the worker on {told.slot} lost the connection to a peer: {told.error}")


def suspense(view: View) -> str:
    """What a node says that does not lead, while a node may be lost: the leader itself may be; "" otherwise."""
    committed = view.committed
    if committed is None or view.current.loss is not None or view.failed_s < _SUSPENSE_S:
        return ""
    acks = [view.ack(committed.id, node) for node in committed.nodes]
    told = first_refusal(ack.peer_lost for ack in acks if ack.peer_lost)
    if told is None or len(committed.nodes) == 1 or any(ack.failed for ack in acks):
        return ""
    return _in_suspense(committed, acks, told, max(view.policy.blame_s, view.policy.lost_s))


def _in_suspense(committed: Generation, acks: list[Ack], told: Refusal, patient_s: float) -> str:
    """Why nothing happens for so long, for people."""
    what = f"{told.slot} lost the connection to a peer, and no worker is known to have ended"
    if len(committed.nodes) == 1:
        return f"{what}; waiting up to {patient_s:g} s for an explanation"
    heard = {ack.node for ack in acks if ack.peer_lost}
    silent = [node for node in committed.nodes if node not in heard]
    who = f"{names(silent)}" if 0 < len(silent) <= _MOST_NAMES else "one of the nodes"
    return f"{what}; perhaps {who} is lost, which the end of its lease will show within {patient_s:g} s"


def _cut(view: View, acks: list[Ack], failure: Failure, why: str) -> Lost | Verdict:
    """All workers live, and form new groups; if that has just been done, it does not help."""
    return after_failure(view, failure, acks) if view.current.fruitless else Lost(view.current, (), why)


def _ended(failed: dict[str, Failure]) -> list[str]:
    return [slot for slot, failure in failed.items() if not failure.kind.is_hang]


def _counted(view: View, lost: Lost, raised: Failure | None = None) -> Lost | Verdict:
    """`lost`, counted as a restart where it is a worker's own error, or the latest of several without progress."""
    if raised is None and view.current.fruitless < _FREE:
        return lost
    if (ended := over_budget(view, raised.exit_code if raised else 1, lost.why)) is not None:
        return ended
    restarts = view.current.restarts + 1
    why = f"counts as restart {restarts} of {view.policy.max_restarts}: {lost.why}"
    return replace(lost, current=replace(lost.current, restarts=restarts), why=why)


def trigger_of(view: View, slots: Iterable[str]) -> Trigger:
    """The kind of the loss of the workers in `slots`; none: all of them live."""
    lost = frozenset(slots)
    if not lost:
        return Trigger.CONNECTION_LOST
    acks = [ack for (generation, _), ack in view.acks.items() if generation >= view.current.committed]
    cause = first_cause(failure for ack in acks for failure in ack.failed if failure.slot in lost)
    if cause is None or {Slot.parse(slot).node for slot in lost}.isdisjoint(view.live):
        return Trigger.NODE_LOST
    return TRIGGERS[cause.kind]


def instead(view: View, committed: Generation, acks: list[Ack], lost: Lost, why: str) -> FreshStart | Verdict:
    """The verdict where the survivors of `lost` cannot go on, for the reason `why`: as for a job without a session."""
    failures = [failure for ack in acks for failure in ack.failed if failure.slot in lost.slots]
    cause = first_cause(failures)
    if cause is not None:
        verdict = after_failure(view, cause, acks)
        if isinstance(verdict, FreshStart):
            return replace(verdict, reason=f"{verdict.reason}; {why}", offenders=lost.offenders)
        return replace(verdict, why=f"{verdict.why}; {why}")
    return FreshStart(view.current, f"{lost.why}; {why}", trigger_of(view, lost.slots), lost.offenders)
