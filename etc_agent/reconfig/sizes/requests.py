"""Requests for another size: accepting or refusing them, and the answers to whoever asked."""

from __future__ import annotations

from dataclasses import replace

from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.parts import base_of
from etc_agent.reconfig.known.records import Current, Reply, Request, Result
from etc_agent.reconfig.known.view import Decision, View, Wait, Write
from etc_agent.reconfig.sizes.sizing import check
from etc_agent.reconfig.sizes.wanted import parse_wanted

_MOST_SHOWN = 200
"""How many characters of a request are repeated in its answer."""


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
        return reply(Result.DONE, f"{message}; all workers were restarted for that: {origin.reason}")
    step = max(ack.step for ack in acks)
    why = origin.reason
    return reply(Result.RESTARTED, f"{message}, but all workers were restarted on the way, from step {step}: {why}")


def is_starting(view: View, committed: Generation) -> bool:
    """Whether the workers of a fresh generation have not yet said at which step they start (plain scripts never do)."""
    acks = [view.ack(committed.id, node) for node in committed.nodes]
    if not committed.is_fresh or view.phase_s >= view.policy.start_s:
        return False
    return not all(ack.in_session for ack in acks) and not any(ack.is_plain for ack in acks)


def take_up(view: View, request: Request) -> Current | Write:
    """`current` with `request` as the wanted size, or the answer that refuses a request which can never be met."""
    current = replace(view.current, handled_scale=request.revision)
    try:
        wanted = parse_wanted(request.text)
    except ValueError as error:
        return Write(current, reply=reply_to(request, Result.REFUSED, str(error)))
    # A repeated request is tried at once: whoever asks again may have removed the cause.
    asked = replace(view, current=replace(current, given_up=()))
    if why := check(asked, wanted):
        return Write(current, reply=reply_to(request, Result.REFUSED, why))
    return replace(
        asked.current,
        wanted=request.text.strip(),
        wanted_before=view.current.wanted,
        pending_scale=request.revision,
        pending_since=view.current.committed,
    )


def answer_meanwhile(view: View, decision: Decision) -> Decision:
    """`decision`, which is about lost workers or nodes; if it is to wait, a new request is answered first."""
    request = view.scale
    if not isinstance(decision, Wait) or view.paused or request is None:
        return decision
    if request.revision <= view.current.handled_scale:
        return decision
    current = take_up(view, request)
    if isinstance(current, Write):
        return current
    waiting = decision.why or "workers are lost, and what is left is being found out"
    return Write(current, reply=reply_to(request, Result.PENDING, waiting))


def reply_to(request: Request, result: Result, message: str) -> Reply:
    """An answer to `request`."""
    shown = request.text if len(request.text) <= _MOST_SHOWN else request.text[:_MOST_SHOWN] + "..."
    return Reply(shown, request.revision, result, message)
