"""What an agent and its workers say to each other over the control socket.

One JSON object per message, its type under ``"type"``. Every message is a frozen dataclass here; fields are JSON
values, so that nothing needs pickle.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

# ---- worker -> agent ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First on every connection: this worker runs a session and can change in place.

    `local_rank` is its slot's index; `generation` the one it was started for. `in_session`: False for a script that
    only sends signs of life.
    """

    type: ClassVar[str] = "hello"
    local_rank: int
    pid: int
    generation: int
    in_session: bool = True


@dataclass(frozen=True, slots=True)
class Described:
    """Answer to Describe. `layout`: of `etc_agent.state.encoding`; None where the model refuses: `error` says why."""

    type: ClassVar[str] = "described"
    config: str
    layout: dict[str, Any] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything for `generation` is built beside training. `digest` is that of the whole migration plan.

    `phases_ms`: what the preparation took, by name.
    """

    type: ClassVar[str] = "prepared"
    generation: int
    digest: str
    phases_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """This worker cannot take part in `generation`: training goes on in the present one, or, where the job was to start
    in it, another config is tried."""

    type: ClassVar[str] = "refused"
    generation: int
    error: str


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
    """The first step after a switch has ended. `stop_ms`: from the end of the last step before it, whole."""

    type: ClassVar[str] = "first_step"
    generation: int
    step: int
    stop_ms: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Now and then: the next step to run, of how many."""

    type: ClassVar[str] = "progress"
    generation: int
    step: int
    num_steps: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Now and then, from a script that calls `etc_agent.heartbeat`: how many times it has."""

    type: ClassVar[str] = "heartbeat"
    count: int


@dataclass(frozen=True, slots=True)
class Plain:
    """The script has made process groups of its own: it runs no session, and another size means a restart."""

    type: ClassVar[str] = "plain"


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
class Raised:
    """User code raised in this worker: the job's failure, not a lost member. The process is about to exit."""

    type: ClassVar[str] = "raised"
    error: str


# ---- agent -> worker ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Describe:
    """Derive the layout that the model would have under `config`, beside training; answer with Described."""

    type: ClassVar[str] = "describe"
    config: str


@dataclass(frozen=True, slots=True)
class Begin:
    """To a warm spare: run the script now, with `environment` added to yours."""

    type: ClassVar[str] = "begin"
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class WhereAreYou:
    """No step has ended for long. Write the stacks of all threads to standard error, then answer with Position."""

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
    """`generation` will not come; drop what was prepared. A joiner exits 0."""

    type: ClassVar[str] = "withdrawn"
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """`generation` is recorded as committed; the old one's groups and records can go."""

    type: ClassVar[str] = "committed"
    generation: int


Message = (
    Hello | Described | Prepared | Refused | Switched | FirstStep | Progress | Heartbeat | Plain | Position | Raised
    | Begin | Describe | WhereAreYou | Prepare | Armed | Withdrawn | Committed
)
_TYPES: dict[str, type[Message]] = {
    message.type: message
    for message in (
        Hello, Described, Prepared, Refused, Switched, FirstStep, Progress, Heartbeat, Plain, Position, Raised,
        Begin, Describe, WhereAreYou, Prepare, Armed, Withdrawn, Committed,
    )
}


def shows_life(message: Message | None) -> bool:
    """Whether `message` shows that a worker's main thread gets on. The time begins with a session, or a heartbeat."""
    if isinstance(message, Hello):
        return message.in_session
    return isinstance(message, Switched | FirstStep | Progress | Heartbeat)


def encode(message: Message) -> dict[str, Any]:
    """The JSON object for `message`."""
    return {"type": message.type, **asdict(message)}


def decode(value: dict[str, Any]) -> Message:
    """The message in a JSON object.

    Raises:
        ValueError: the type is unknown or the fields are not that type's.
    """
    fields = dict(value)
    kind = fields.pop("type", None)
    if kind not in _TYPES:
        raise ValueError(f"unknown control message {kind!r}")
    try:
        return _TYPES[kind](**fields)
    except TypeError as error:
        raise ValueError(f"malformed control message {kind!r}: {error}") from None
