"""The messages between an agent and its workers over the control socket.

One JSON object per message, with its type under ``"type"``. Every message is a frozen dataclass; fields are JSON
values, so that no pickle is needed. `decode` checks the type of every field, so that the code that handles messages
need not.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from etc_agent.control.causes import ErrorKind

# ---- worker -> agent ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First on every connection: this worker runs a session and can change in place.

    `local_rank` is its slot's index; `generation` the one it was started for, `step` the first that it runs there.
    `in_session`: False for a script that only sends heartbeats.
    """

    type: ClassVar[str] = "hello"
    local_rank: int
    pid: int
    generation: int
    in_session: bool = True
    step: int = 0


@dataclass(frozen=True, slots=True)
class Described:
    """Answer to Describe. `layout`: as encoded by `etc_agent.state.encoding`; None with the reason in `error`, which is
    final only where its kind is `MODEL`."""

    type: ClassVar[str] = "described"
    config: str
    layout: dict[str, Any] | None
    error: str = ""
    kind: ErrorKind = ErrorKind.RAISED


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything for `generation` is prepared beside training. `digest`: of the whole migration plan.

    `phases_ms`: duration of each part of the preparation.
    """

    type: ClassVar[str] = "prepared"
    generation: int
    digest: str
    phases_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """This worker cannot take part in `generation`, so training continues in the present one. If the job was to start
    in it, the model refuses its config, and this worker answers Describe until it is stopped."""

    type: ClassVar[str] = "refused"
    generation: int
    error: str
    kind: ErrorKind = ErrorKind.RAISED


@dataclass(frozen=True, slots=True)
class Switched:
    """The migration vote succeeded: this worker is in `generation` (or has left it, and exits 0).

    `step`: the first step of the new generation. `phases_ms`: milliseconds of stopped training by phase.
    `sent_bytes`, `received_bytes`, `referred_bytes`: of this worker.
    """

    type: ClassVar[str] = "switched"
    generation: int
    step: int
    phases_ms: dict[str, float]
    sent_bytes: int
    received_bytes: int
    referred_bytes: int


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step after a switch is complete. `stop_ms`: from the end of the last step before it to its own end."""

    type: ClassVar[str] = "first_step"
    generation: int
    step: int
    stop_ms: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Sent now and then, and at the end: the next step to run, the number of steps, and the seconds of a step, on
    average over those since the last of these messages, with what the script did between steps. `copied`: the step of
    the newest copy set that is complete on this worker, -1 for none."""

    type: ClassVar[str] = "progress"
    generation: int
    step: int
    num_steps: int
    step_s: float
    copied: int = -1


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent now and then by a script that calls `etc_agent.heartbeat`: how many times it has called it."""

    type: ClassVar[str] = "heartbeat"
    count: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """This worker got the signal `number`, which tells a node to leave, and leaves the decision to its agent: that
    hands the node's state over, or sends the signal again, which then ends the worker."""

    type: ClassVar[str] = "signalled"
    number: int


@dataclass(frozen=True, slots=True)
class Plain:
    """The script has made process groups of its own: it runs no session, so another size needs a restart."""

    type: ClassVar[str] = "plain"


@dataclass(frozen=True, slots=True)
class Warm:
    """This warm spare has imported everything, and becomes a worker as soon as it is told to begin."""

    type: ClassVar[str] = "warm"


@dataclass(frozen=True, slots=True)
class Position:
    """Answer to WhereAreYou: the main thread is in `phase` of `step`, at `where` (file:line, the innermost that is not
    PyTorch's or ours). `is_waiting`: inside a collective, for other ranks. `generation`: 0 before the first."""

    type: ClassVar[str] = "position"
    STEP: ClassVar[str] = "step"
    VOTE: ClassVar[str] = "the vote of step"
    BETWEEN: ClassVar[str] = "the pause before step"
    SWITCH: ClassVar[str] = "the change before step"
    generation: int
    step: int
    phase: str
    is_waiting: bool
    where: str


@dataclass(frozen=True, slots=True)
class Frozen:
    """Answer to Freeze: this worker promises never to take part in a vote of an earlier moment any more.

    `loss`: that of Freeze. `generation`: the one in force here, 0 before a joiner's first. `step`: the next step to run
    there, so the number of steps whose vote it has seen; `ok`: the result of the last of them. `completed`: the
    generation for which it has everything but the result of the migration vote, so that it can still enter it; 0: none.
    `broken`: why its state can neither be continued nor entered (a loss after `release` had begun), "" normally.
    `copied`: the step of the newest copy set that is complete here, -1 for none.
    """

    type: ClassVar[str] = "frozen"
    loss: int
    generation: int
    step: int
    ok: bool = True
    completed: int = 0
    broken: str = ""
    copied: int = -1


@dataclass(frozen=True, slots=True)
class PeerLost:
    """An operation with peers has failed here, or the script's step ended by such an error. The worker waits for
    Freeze, and fails by `error` if none comes. `kind`: PEER_LOST or UNCLEAR."""

    type: ClassVar[str] = "peer_lost"
    generation: int
    step: int
    error: str
    kind: ErrorKind = ErrorKind.PEER_LOST


@dataclass(frozen=True, slots=True)
class Raised:
    """An error is about to end this process. `kind`: whether it is this worker's own."""

    type: ClassVar[str] = "raised"
    error: str
    kind: ErrorKind = ErrorKind.RAISED


@dataclass(frozen=True, slots=True)
class Closed:
    """The session has been closed in order: its steps are done, or the script has left them by its own decision. A
    worker that exits with code 0 without having said this may still be needed by the others."""

    type: ClassVar[str] = "closed"


# ---- agent -> worker ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Describe:
    """Derive the layout that the model would have under `config`, beside training; answer with Described."""

    type: ClassVar[str] = "describe"
    config: str


@dataclass(frozen=True, slots=True)
class Begin:
    """To a warm spare: run the script now, with `environment` added to the process's own."""

    type: ClassVar[str] = "begin"
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class WhereAreYou:
    """No step has completed for long. Write the stacks of all threads to standard error, then answer with Position."""

    type: ClassVar[str] = "where_are_you"


@dataclass(frozen=True, slots=True)
class Prepare:
    """Build `generation` beside training; answer with Prepared or Refused. `previous` is the one that is migrated.

    Both are `Generation.to_json()`. A worker whose slot is only in `previous` leaves, one only in `generation` joins.
    `node` is this worker's node name, so that ``Slot(node, local_rank)`` finds it in the placements.
    """

    type: ClassVar[str] = "prepare"
    node: str
    generation: dict[str, Any]
    previous: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Armed:
    """From now on, vote for `generation`."""

    type: ClassVar[str] = "armed"
    generation: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """`generation` was withdrawn; drop what was prepared. A worker that joins exits with code 0."""

    type: ClassVar[str] = "withdrawn"
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """`generation` is recorded as committed; what is left of the old one can be freed."""

    type: ClassVar[str] = "committed"
    generation: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """Workers were lost: cut this worker's connections to peers, freeze, and answer with Frozen. `loss`: the number of
    the loss; it grows when more workers are lost while one is handled, and then this is sent again."""

    type: ClassVar[str] = "freeze"
    loss: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all survivors of a loss continue from: `generation` is in force and `step` is the next step. A worker that
    has completed the migration to `generation` enters it; one that has not seen the vote of ``step - 1`` applies that
    step with the result `ok`; all others drop the gradients of the step that was under way. `from_copies`: every worker
    goes back to its copy set of `step` instead, since only copies are left of a part of the state."""

    type: ClassVar[str] = "agreed"
    loss: int
    generation: int
    step: int
    ok: bool = True
    from_copies: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """The job stops: write a checkpoint at the next safe point that all workers agree on, then exit with code 0."""

    type: ClassVar[str] = "finish"


Message = (
    Hello | Described | Prepared | Refused | Switched | FirstStep | Progress | Heartbeat | Plain | Position | Raised
    | Signalled | Frozen | PeerLost | Warm | Closed
    | Begin | Describe | WhereAreYou | Prepare | Armed | Withdrawn | Committed | Freeze | Agreed | Finish
)
_TYPES: dict[str, type[Message]] = {
    message.type: message
    for message in (
        Hello, Described, Prepared, Refused, Switched, FirstStep, Progress, Heartbeat, Plain, Position, Raised,
        Signalled, Frozen, PeerLost, Warm, Closed,
        Begin, Describe, WhereAreYou, Prepare, Armed, Withdrawn, Committed, Freeze, Agreed, Finish,
    )
}


def shows_life(message: Message | None) -> bool:
    """Whether `message` shows that a worker's main thread makes progress. Measuring starts with a session or a
    heartbeat.
    """
    if isinstance(message, Hello):
        return message.in_session
    return isinstance(message, Switched | FirstStep | Progress | Heartbeat)


def encode(message: Message) -> dict[str, Any]:
    """The JSON object for `message`."""
    return {"type": message.type, **asdict(message)}


def decode(value: object) -> Message:
    """The message in a JSON value.

    Raises:
        ValueError: it is no object, the type is unknown, or the fields are not that type's.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a control message is a JSON object, not {str(value)[:80]!r}")
    given = dict(value)
    name = given.pop("type", None)
    if not isinstance(name, str) or name not in _TYPES:
        raise ValueError(f"unknown control message {str(name)[:80]!r}")
    for key, kind in _FIELDS[name].items():
        if key in given:
            given[key] = _checked(f"{name}.{key}", given[key], kind)
    try:
        return _TYPES[name](**given)
    except TypeError as error:
        raise ValueError(f"malformed control message {name!r}: {str(error)[:200]}") from None


def _field_types(message: type[Message]) -> dict[str, Any]:
    hints = get_type_hints(message)
    return {each.name: hints[each.name] for each in fields(message)}


_FIELDS = {name: _field_types(message) for name, message in _TYPES.items()}
_INTEGERS = range(-(1 << 63), 1 << 63)


def _checked(name: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, StrEnum) and value in list(kind):
        return kind(value)
    if not _fits(value, kind):
        raise ValueError(f"malformed control message: {name} is {str(value)[:80]!r}")
    return value


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of the type that a field of a message is declared with."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(item, get_args(kind)[1]) for item in value.values())
    if kind is Any:
        return True
    if kind in (None, NoneType):
        return value is None
    if kind is float and type(value) is float:
        return math.isfinite(value)
    if kind in (int, float):
        return type(value) is int and value in _INTEGERS
    return kind in (str, bool) and type(value) is kind
