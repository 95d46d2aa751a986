"""In one sentence: what a job's leader waits for at this moment, and why. Read from the job's records."""

from __future__ import annotations

from collections.abc import Iterable

from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.records import Loss, Phase, Result, first_cause
from launcher.ctl.job.jobs import Job, State


def explain(job: Job) -> str:
    """The sentence. Where the leader itself has said what it waits for, that counts; the records say the rest."""
    current, state = job.current, job.state
    if state.has_ended:
        return f"The job has {state}: {current.why or 'no reason is known'}."
    if state is State.GONE:
        return (
            "No node of the job is here: its agents have ended, or have not reached etcd for longer than their lease; "
            "an etc-run with this run id starts the job again."
        )
    if not job.records.leader:
        return "No node leads at this moment; another takes the lead when the last leader's lease is over."
    if job.records.stop is not None:
        return "An administrator has told the job to stop; the leader ends it now."
    if current.loss is not None:
        return _recovering(job, current.loss)
    if (proposed := job.proposed) is not None:
        return _changing(job, proposed)
    if (failed := _failed(job)) is not None:
        return failed
    if why := str(job.status.get("why", "")):
        return f"{_capital(why)}."
    if job.committed is None:
        return f"The job has not started: {_of_min_nodes(job)}."
    if (starting := _starting(job, job.committed)) is not None:
        return starting
    return _quiet(job, job.committed)


def _recovering(job: Job, loss: Loss) -> str:
    lost = f"Generation {job.current.committed} has lost {_list(loss.slots)} ({loss.why})"
    if loss.agreement is not None and loss.agreement.loss == loss.number:
        return f"{lost}; the survivors continue from step {loss.agreement.step}, in a generation that is being built."
    nodes = job.committed.nodes if job.committed else ()
    alive = {node.name for node in job.nodes}
    waiting = [
        node for node in nodes
        if node in alive and job.committed and not _has_frozen(job, job.committed, node, loss.number)
    ]
    return f"{lost}; it waits for the workers of {_list(waiting) or 'no node'} to say which step they have reached."


def _has_frozen(job: Job, generation: Generation, node: str, loss: int) -> bool:
    frozen = job.ack(generation, node).frozen
    return frozen is not None and frozen.loss >= loss


def _changing(job: Job, proposed: Generation) -> str:
    what = f"generation {proposed.id}, {proposed.config} ({proposed.reason})"
    nodes = job.participants(proposed)
    if job.current.phase is Phase.ARMED:
        slow = [node for node in nodes if not job.ack(proposed, node).switched]
        return f"{_capital(what)}, is prepared; {_list(slow)} switch after the training step under way."
    slow = [node for node in nodes if not job.ack(proposed, node).prepared]
    ready = f"{len(nodes) - len(slow)} of {len(nodes)} nodes are ready"
    missing = f", {_list(slow)} not yet" if slow else ""
    return f"{_capital(what)}, is prepared beside training: {ready}{missing}."


def _failed(job: Job) -> str | None:
    committed = job.committed
    if committed is None:
        return None
    cause = first_cause(ack.failure for node in committed.nodes if (ack := job.ack(committed, node)).failure)
    here = {node.name for node in job.nodes}
    absent = [node for node in committed.nodes if node not in here]
    if absent:
        return f"Node {_list(absent)} is gone from etcd; until its workers have certainly stopped, nobody takes over."
    if cause is None:
        return None
    return f"The worker on {cause.slot} failed ({cause.kind}: {cause.error}); the leader finds out what has to restart."


def _starting(job: Job, committed: Generation) -> str | None:
    acks = [job.ack(committed, node) for node in committed.nodes]
    slow = [ack.node for ack in acks if not ack.in_session and not ack.is_plain and not ack.finished]
    if not committed.is_fresh or not slow:
        return None
    return f"The workers of generation {committed.id} on {_list(slow)} start, or run a script without a session."


def _quiet(job: Job, committed: Generation) -> str:
    runs = f"the job trains as {committed.config}"
    scale, current = job.records.scale, job.current
    is_unanswered = scale is not None and scale.revision > current.handled_scale
    if job.pause is not None:
        because = f" ({job.pause})" if str(job.pause) else ""
        waits = f", and the request {scale.text} waits" if scale is not None and is_unanswered else ""
        return f"Nothing changes while the job is paused{because}; {runs}{waits}."
    if scale is not None and is_unanswered:
        return f"The request {scale.text} was just written, and the leader has not answered it yet."
    if current.pending_scale and job.reply is not None and job.reply.result is Result.PENDING:
        return f"The request {job.reply.request} is pending: {job.reply.message}."
    if committed.is_held:
        return f"The state is kept in memory and no step is run: {_of_min_nodes(job)}."
    finishing = [node for node in committed.nodes if job.ack(committed, node).finished]
    if finishing:
        return f"Workers of {_list(finishing)} have finished; the job ends when all have."
    return f"The leader waits for nothing: {runs}."


def _of_min_nodes(job: Job) -> str:
    least = str(job.rules.get("nnodes", "")).partition(":")[0] or "?"
    return f"{len(job.nodes)} of at least {least} nodes (--nnodes) are here"


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
