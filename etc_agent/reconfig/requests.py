"""What is said to whoever asked for a size, once the job has it."""

from __future__ import annotations

from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.member import base_of
from etc_agent.reconfig.records import Reply, Result
from etc_agent.reconfig.view import View


def met(view: View, reached: Generation, message: str) -> Reply:
    """The answer to the pending request, which `reached` meets. `message`: what the job does now."""
    current = view.current

    def reply(result: Result, message: str) -> Reply:
        return Reply(current.wanted, current.pending_scale, result, message, reached.id)

    origin = view.generations[base_of(reached, view.generations)]
    if not current.pending_since or origin.id <= current.pending_since:
        return reply(Result.DONE, message)
    acks = [view.ack(origin.id, node) for node in origin.nodes]
    if not all(ack.in_session for ack in acks):
        return reply(Result.DONE, f"{message}; it was started anew for that: {origin.reason}")
    step = max(ack.step for ack in acks)
    return reply(Result.RESTARTED, f"{message}, but it was started anew on the way, at step {step}: {origin.reason}")


def is_starting(view: View, committed: Generation) -> bool:
    """Whether the workers of a fresh generation have yet to say from which step they go on, if they ever will."""
    acks = [view.ack(committed.id, node) for node in committed.nodes]
    if not committed.is_fresh or view.phase_s >= view.policy.start_s:
        return False
    return not all(ack.in_session for ack in acks) and not any(ack.is_plain for ack in acks)
