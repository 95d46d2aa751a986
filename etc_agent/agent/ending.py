"""When an agent without running workers ends, and with which exit code. Pure: from facts to the decision."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from etc_agent.agent.settings import Timeouts
from etc_agent.reconfig.records import Current, Outcome


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known on one node, none of whose workers is running.

    `has_finished`: it had workers, and all of them have exited with code 0. `failed_with`: the exit code of the worker
    that failed first, 0 where none has. `is_member`: this node has workers, or is about to start some. `is_alone`:
    there is no other node. `is_leader`: this node has recorded how the job ended. `is_told_to_leave`: by a signal, the
    preemption probe or an administrator; `signals`: the first of these. `is_stopping`: its workers were stopped, and it
    takes part in nothing more. `unheard_s`: for how many seconds there have been neither workers nor answers from etcd;
    None while etcd answers.
    """

    current: Current
    has_finished: bool = False
    failed_with: int = 0
    is_member: bool = False
    is_alone: bool = False
    is_leader: bool = False
    is_told_to_leave: bool = False
    signals: tuple[int, ...] = ()
    is_stopping: bool = False
    unheard_s: float | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The agent's exit code and message. `has_left`: the job continues, or ends, without this node."""

    exit_code: int
    why: str = ""
    level: int = logging.INFO
    has_left: bool = False


def end_of(facts: Facts, timeouts: Timeouts) -> End | None:
    """How the agent ends now; None where it continues."""
    current, signals = facts.current, facts.signals
    if facts.is_stopping:
        return End(0 if facts.has_finished else 128 + signals[-1] if signals else 1)
    if current.outcome is Outcome.STOPPED and signals:
        return End(128 + signals[0])
    if current.outcome is Outcome.SUCCEEDED or (current.outcome is not Outcome.RUNNING and facts.is_leader):
        return End(current.exit_code)
    if current.outcome is not Outcome.RUNNING:
        return End(current.exit_code, f"the job {current.outcome}: {current.why}", logging.ERROR)
    if facts.is_told_to_leave and not facts.is_member and (current.committed or not facts.is_alone):
        return End(0, "this node has left the job", has_left=True)
    return _without_etcd(facts, facts.unheard_s, timeouts) if facts.unheard_s is not None else None


def _without_etcd(facts: Facts, unheard_s: float, timeouts: Timeouts) -> End | None:
    """The end of a node that cannot learn from etcd how the job has ended."""
    silence = f"etcd has not answered for {unheard_s:.0f} s"
    if facts.has_finished and (unheard_s >= timeouts.end_s or facts.is_told_to_leave):
        return End(0, f"every worker of this node has finished; {silence} since (timeouts.end_s)", logging.WARNING)
    if not facts.has_finished and unheard_s >= timeouts.join_s:
        return End(facts.failed_with or 1, f"this node has no workers, and {silence} (timeouts.join_s)", logging.ERROR)
    return None
