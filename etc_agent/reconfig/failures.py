"""Failures and lost nodes: whether to wait for a better explanation, to start all workers afresh, or to end the job.

`judge` decides that; the leader turns the verdict into a fresh generation or into the job's end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from etc_agent.parallel.generation import Generation, Trigger
from etc_agent.reconfig.known.records import Ack, Current, Failure, FailureKind, first_cause
from etc_agent.reconfig.known.view import Policy, View, Wait

_VARYING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
"""What may differ between two failures of the same kind: pids, ports, addresses, times."""
EVIDENCE_S = 5.0
"""Seconds from the first sign of a hang until the leader acts: every node checks its workers and writes stacks
first."""
TRIGGERS = {
    FailureKind.RAISED: Trigger.WORKER_RAISED,
    FailureKind.KILLED: Trigger.WORKER_KILLED,
    FailureKind.UNRESPONSIVE: Trigger.WORKER_HUNG,
    FailureKind.HUNG: Trigger.WORKER_HUNG,
    FailureKind.WAITING: Trigger.WORKER_HUNG,
    FailureKind.SILENT: Trigger.WORKER_ENDED,
    FailureKind.UNCLEAR: Trigger.WORKER_ENDED,
    FailureKind.PEER_LOST: Trigger.CONNECTION_LOST,
}


OF_OTHERS = (FailureKind.UNCLEAR, FailureKind.PEER_LOST, FailureKind.WAITING)
"""Failures that another worker's has probably caused."""


@dataclass(frozen=True, slots=True)
class FreshStart:
    """Every worker has to be started afresh. `current`: the record with the restart counted.
    `offenders`: the slots and nodes that caused it, by name."""

    current: Current
    reason: str
    trigger: Trigger
    offenders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job has failed."""

    exit_code: int
    why: str


Verdict = Wait | FreshStart | EndJob


def judge(view: View, committed: Generation, acks: list[Ack]) -> Verdict | None:
    """The verdict on nodes and workers that are gone; None where all are present.

    `acks`: of every node whose workers belong to the job now.
    """
    members = [node for node in committed.nodes if not view.ack(committed.id, node).finished]
    missing = [*view.lost(members), *(ack.node for ack in acks if ack.lost and ack.node in view.live)]
    if missing:
        return without(view, missing)
    if absent := [node for node in members if node not in view.live]:
        # The node may come back. Until it is certainly lost, its workers could meet those of the next generation.
        return Wait(max(view.policy.lost_s - view.connected_s, *map(view.fenced_in_s, absent)))
    failure = first_cause(ack.failure for ack in acks if ack.failure)
    if failure is None:
        return None
    patient_s = patience_s(view.policy, failure.kind, len(committed.nodes))
    if view.failed_s < patient_s:
        return Wait(patient_s - view.failed_s)
    failure = _left_alone(failure, next((ack.ended for ack in acks if ack.ended), ""))
    return after_failure(view, failure, acks)


def _left_alone(failure: Failure, ended: str) -> Failure:
    """`failure`, corrected where the worker in slot `ended` has exited with code 0 while the others continued.

    A worker that lost a peer lost that one, unless a better cause is known. A script without a session that failed
    without an error message may have failed for any reason.
    """
    if not ended:
        return failure
    if failure.kind is FailureKind.PEER_LOST:
        why = f"it ended with exit code 0 while the others still needed it; {failure.slot}: {failure.error}"
        return replace(failure, slot=ended, error=why)
    return replace(failure, error=f"{failure.error} (the worker on {ended} had ended with exit code 0)")


def without(view: View, missing: list[str]) -> Verdict:
    """Nodes are lost: continue without them, or wait for others where too few are left."""
    lost = f"{names(missing)} was lost"
    return below_min(view, lost) or FreshStart(view.current, lost, Trigger.NODE_LOST, tuple(missing))


def below_min(view: View, what: str) -> Wait | EndJob | None:
    """The verdict where workers have to be started afresh because of `what`, but too few nodes are present: to wait for
    more, at most `below_min_s`. None where there are enough."""
    policy = view.policy
    if not view.is_below_min:
        return None
    if view.quiet_s < policy.below_min_s:
        here = f"{what} and {len(view.usable)} of at least {policy.min_nodes} nodes are here"
        return Wait(policy.below_min_s - view.quiet_s, f"waiting for nodes: {here}")
    nobody = f"nobody came in {policy.below_min_s:g} s (timeouts.join_s)"
    return EndJob(1, f"{what}, nnodes wants at least {policy.min_nodes}, and {nobody}")


def patience_s(policy: Policy, kind: FailureKind, num_nodes: int) -> float:
    """Seconds to wait for a better explanation: a dead node is noticed only when its lease runs out."""
    if kind in (FailureKind.RAISED, FailureKind.KILLED):
        return 0.0
    if kind in (FailureKind.UNRESPONSIVE, FailureKind.HUNG):
        return EVIDENCE_S
    if num_nodes > 1:
        return policy.lost_s
    return policy.blame_s if kind in (FailureKind.UNCLEAR, FailureKind.PEER_LOST) else 0.0


def after_failure(view: View, failure: Failure, acks: list[Ack]) -> FreshStart | EndJob:
    """The verdict on a failed worker: a fresh start, unless the restart budget is used up or the job keeps failing in
    the same way before it makes progress.

    A script without a session reports no steps; it has made progress if it ran longer than a worker may take to start.
    """
    current, policy = view.current, view.policy
    what = described(view, failure)
    is_starting = any(ack.in_session for ack in acks) or view.phase_s < policy.start_s
    is_early = is_starting and not any(ack.has_stepped for ack in acks)
    signature = f"{failure.kind}: {_VARYING.sub('#', failure.error)}" if is_early else ""
    alike = current.failed_alike + 1 if is_early and signature == current.failed_as else int(is_early)
    if (ended := over_budget(view, failure.exit_code, what)) is not None:
        return ended
    if policy.alike_failures and alike >= policy.alike_failures:
        return EndJob(failure.exit_code, f"{what} ({alike} times alike before the first step; alike_failures)")
    current = replace(current, restarts=current.restarts + 1, failed_as=signature, failed_alike=alike)
    what = f"restart {current.restarts} of {policy.max_restarts}: {what}"
    offenders = () if failure.kind in OF_OTHERS else (failure.slot,)
    return FreshStart(current, what, TRIGGERS[failure.kind], offenders)


def over_budget(view: View, exit_code: int, what: str) -> EndJob | None:
    """The end of the job where another restart because of `what` would exceed the budget."""
    policy = view.policy
    if view.current.restarts < policy.max_restarts:
        return None
    return EndJob(exit_code, what + (f" ({policy.max_restarts} restarts used up)" if policy.max_restarts else ""))


def described(view: View, failure: Failure) -> str:
    """A failure for people."""
    if failure.kind.is_hang:
        return f"the worker on {failure.slot}, rank {_rank(view, failure.slot)}, {failure.error}"
    return f"the worker on {failure.slot} failed: {failure.error}"


def _rank(view: View, slot: str) -> int | None:
    placement = view.committed.placement if view.committed else ()
    return next((rank for rank, other in enumerate(placement) if str(other) == slot), None)


def names(nodes: Iterable[str]) -> str:
    """Node names as a list for people."""
    return ", ".join(f"node {name}" for name in nodes)
