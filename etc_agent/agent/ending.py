"""When an agent without running workers ends, how, and with which exit code. Pure: from facts to the decision."""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass
from enum import StrEnum

from etc_agent.agent.settings import Timeouts
from etc_agent.reconfig.known.records import Current, Outcome


class Ending(StrEnum):
    """How this node's part of the job has ended. `STOPPED`: by a signal or an administrator, unfinished. `LEFT`: the
    job goes on, or ends, without this node. `REFUSED`: it could not begin."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LEFT = "left"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known on one node, none of whose workers is running.

    `has_finished`: it had workers, and all of them have exited with code 0. `failed_with`: the exit code of the worker
    that failed first, 0 where none has. `is_member`: this node has workers, or is about to start some. `is_alone`:
    there is no other node. `is_leader`: this node has recorded how the job ended. `is_told_to_leave`: by a signal, the
    preemption probe or an administrator; `is_taken_away`: not by an administrator, so another node may take its place;
    `signals`: the first of these. `is_stopping`: its workers were stopped, and it takes part in nothing more.
    `unheard_s`: for how many seconds there have been neither workers nor answers from etcd; None while etcd answers.
    `has_progressed`: since all workers were started last, one has completed a step, or a script without a session has
    run for longer than a start takes. `is_below_min`: too few nodes are here. `is_stop_ordered`: an administrator has
    ended the job.
    """

    current: Current
    has_finished: bool = False
    failed_with: int = 0
    is_member: bool = False
    is_alone: bool = False
    is_leader: bool = False
    is_told_to_leave: bool = False
    is_taken_away: bool = False
    signals: tuple[int, ...] = ()
    is_stopping: bool = False
    unheard_s: float | None = None
    has_progressed: bool = False
    is_below_min: bool = False
    is_stop_ordered: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """The agent's exit code and message. `start_again`: whether the same command may get further than this one has."""

    exit_code: int
    ending: Ending
    why: str = ""
    level: int = logging.INFO
    start_again: bool = False


def end_of(facts: Facts, timeouts: Timeouts) -> End | None:
    """How the agent ends now; None where it continues."""
    current, signals = facts.current, facts.signals
    if facts.is_stopping:
        return _stopped_here(facts)
    if current.outcome is Outcome.SUCCEEDED:
        return End(current.exit_code, Ending.SUCCEEDED)
    if current.outcome is Outcome.STOPPED and signals:
        return End(128 + signals[0], Ending.STOPPED, start_again=_is_to_go_on(facts))
    if current.outcome is not Outcome.RUNNING:
        ending, again = Ending(current.outcome), _is_to_go_on(facts)
        if facts.is_leader:  # it has said why already
            return End(current.exit_code, ending, start_again=again)
        why = f"the job {current.outcome}: {current.why}"
        return End(current.exit_code, ending, why, logging.ERROR, again)
    if facts.is_told_to_leave and not facts.is_member and (current.committed or not facts.is_alone):
        return End(0, Ending.LEFT, "this node has left the job", start_again=facts.is_taken_away)
    return _without_etcd(facts, facts.unheard_s, timeouts) if facts.unheard_s is not None else None


def _stopped_here(facts: Facts) -> End:
    if facts.has_finished:
        return End(0, Ending.SUCCEEDED)
    if facts.signals:
        return End(128 + facts.signals[-1], Ending.STOPPED, start_again=_is_to_go_on(facts))
    return End(1, Ending.FAILED, start_again=facts.is_taken_away)


def _is_to_go_on(facts: Facts) -> bool:
    """Whether a job that has not succeeded may get further when it is started again: one that was taken away by its
    scheduler, failed after it had made progress, or had too few nodes. A person who presses Ctrl-C means the end."""
    if facts.current.outcome is Outcome.FAILED:
        return facts.has_progressed or facts.is_below_min
    return not facts.is_stop_ordered and signal.SIGINT not in facts.signals


def _without_etcd(facts: Facts, unheard_s: float, timeouts: Timeouts) -> End | None:
    """The end of a node that cannot learn from etcd how the job has ended."""
    silence = f"etcd has not answered for {unheard_s:.0f} s"
    if facts.has_finished and (unheard_s >= timeouts.end_s or facts.is_told_to_leave):
        why = f"every worker of this node has finished; {silence} since (timeouts.end_s)"
        return End(0, Ending.SUCCEEDED, why, logging.WARNING)
    if not facts.has_finished and unheard_s >= timeouts.join_s:
        why = f"this node has no workers, and {silence} (timeouts.join_s)"
        return End(facts.failed_with or 1, Ending.FAILED, why, logging.ERROR, start_again=True)
    return None
