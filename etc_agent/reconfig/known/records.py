"""The records that agents share through etcd, as values. The table of keys in docs/architecture.md says who writes
which.

`to_json` and `from_json` are exact inverses; fields that a newer version adds are ignored by an older one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Frozen
from etc_agent.parallel.generation import Trigger


class NodeState(StrEnum):
    READY = "ready"
    DRAINING = "draining"


class Phase(StrEnum):
    """Of `current`: the phase of the proposed generation, if there is one."""

    IDLE = "idle"
    PROPOSED = "proposed"
    ARMED = "armed"


class Outcome(StrEnum):
    """How the job ended; `RUNNING` until then."""

    RUNNING = ""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class _Json:
    """JSON by field name, for flat records of JSON values and string enums."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**_known(cls, value))


def _known(kind: Any, value: dict[str, Any]) -> dict[str, Any]:
    """The items of `value` that are fields of the dataclass `kind`."""
    known = {field_.name for field_ in fields(kind)}
    return {name: item for name, item in value.items() if name in known}


@dataclass(frozen=True, slots=True)
class NodeRecord(_Json):
    """``nodes/<node>``, under its agent's lease.

    `rank`: the place in the order of nodes that the user asked for, or None. `joined`: the order of arrival (the
    key's create_revision), filled in by the reader. `instance`: distinguishes two lives of one name. `role`: torchrun's
    ``--role``. `cleared`: no worker runs here that was started for an earlier generation than this. `contact_port`:
    where its agent answers other agents directly (`agent.safety.contact`). `spares`: the slots whose warm spare is
    ready to become a worker.
    """

    name: str
    address: str
    num_slots: int
    store_port: int
    instance: str
    state: NodeState = NodeState.READY
    rank: int | None = None
    role: str = "default"
    joined: int = 0
    cleared: int = 0
    contact_port: int = 0
    spares: tuple[int, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        record = super(NodeRecord, cls).from_json(value)
        return replace(record, state=NodeState(record.state), spares=tuple(record.spares))


@dataclass(frozen=True, slots=True)
class Testimony(_Json):
    """``gone/<node>``, for a limited time: the workers of this instance of the node have ended, and it starts no more.

    Written by the guardian of an agent that was killed, or by an agent that ends, in the transaction that removes the
    node's record. So nobody needs to wait until a node that is cut off would have stopped its workers.
    """

    instance: str


class FailureKind(StrEnum):
    """Why a worker ended or hangs, ordered by how likely it caused the failures of others. `RAISED`: it raised an
    error. `KILLED`: a signal ended it. `UNRESPONSIVE`: it hangs and does not answer. `HUNG`: it hangs outside a
    collective. `SILENT`: it ended with an exit code and no error message. `UNCLEAR`: by an error that a lost peer may
    have caused. `PEER_LOST`: because a peer was lost, whose own failure is the cause. `WAITING`: it hangs in a
    collective, because of another worker.
    """

    RAISED = "raised"
    KILLED = "killed"
    UNRESPONSIVE = "unresponsive"
    HUNG = "hung"
    SILENT = "silent"
    UNCLEAR = "unclear"
    PEER_LOST = "peer_lost"
    WAITING = "waiting"

    @property
    def is_hang(self) -> bool:
        """Whether the process is still running."""
        return self in (FailureKind.UNRESPONSIVE, FailureKind.HUNG, FailureKind.WAITING)


@dataclass(frozen=True, slots=True)
class Failure(_Json):
    """Why a worker ended; `exit_code` is the one that etc-run returns (128 + signal where a signal ended it). `at`: the
    progress of a worker that hangs: of two, the one that is behind is more likely the cause."""

    slot: str
    kind: FailureKind
    exit_code: int
    error: str
    at: float = 0.0

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        record = super(Failure, cls).from_json(value)
        return replace(record, kind=FailureKind(record.kind))


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure that most likely caused the others."""
    kinds = list(FailureKind)
    return min(failures, key=lambda failure: (kinds.index(failure.kind), failure.at, failure.slot), default=None)


@dataclass(frozen=True, slots=True)
class Refusal(_Json):
    """Why the worker in `slot` cannot take part in a generation."""

    slot: str
    kind: ErrorKind
    error: str

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        record = super(Refusal, cls).from_json(value)
        return replace(record, kind=ErrorKind(record.kind))

    @classmethod
    def of(cls, failure: Failure) -> Self:
        """The refusal that follows from a failure: a worker that has ended cannot take part either."""
        kinds = {FailureKind.UNCLEAR: ErrorKind.UNCLEAR, FailureKind.PEER_LOST: ErrorKind.PEER_LOST}
        return cls(failure.slot, kinds.get(failure.kind, ErrorKind.RAISED), failure.error)

    @property
    def node(self) -> str:
        return self.slot.rpartition("/")[0]

    def __str__(self) -> str:
        return self.error if self.kind is ErrorKind.MODEL else f"{self.slot}: {self.error}"


def first_refusal(refusals: Iterable[Refusal]) -> Refusal | None:
    """The refusal that most likely caused the others."""
    kinds = list(ErrorKind)
    return min(refusals, key=lambda refusal: (kinds.index(refusal.kind), refusal.slot), default=None)


@dataclass(frozen=True, slots=True)
class GivenUp(_Json):
    """A parallel config that the job could not change to, and `why`.

    `kind`: what the model refuses is not tried again before the next request; everything else may pass. `tries`: how
    many times in a row it failed. `instance`: the node that caused it, "" where none can be named; the record is
    dropped when that node goes.
    """

    config: str
    kind: ErrorKind
    why: str
    tries: int = 1
    instance: str = ""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        record = super(GivenUp, cls).from_json(value)
        return replace(record, kind=ErrorKind(record.kind))


@dataclass(frozen=True, slots=True)
class Agreement(_Json):
    """What all survivors of a loss continue from; see `control.messages.Agreed`. `loss`: the number of the loss for
    which the survivors last confirmed it; it is in force for that one only."""

    generation: int
    step: int
    ok: bool = True
    loss: int = 0
    from_copies: bool = False


@dataclass(frozen=True, slots=True)
class Loss(_Json):
    """The loss of workers that the job is handling in place.

    `number`: grows with every worker that is lost while an earlier loss is handled, and from loss to loss. `slots`: the
    lost workers of the committed generation. `why`: for people. `agreement`: None until all survivors have frozen; it
    is kept when more workers are lost, since survivors may have acted on it. `phases_ms`: milliseconds of each phase of
    the recovery that is over, as the leader saw it. `trigger`: the kind of the first of these losses.
    """

    number: int
    slots: tuple[str, ...]
    why: str
    agreement: Agreement | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    trigger: Trigger = Trigger.NODE_LOST

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        record = super(Loss, cls).from_json(value)
        agreement: Any = record.agreement
        return replace(
            record, slots=tuple(record.slots), agreement=Agreement.from_json(agreement) if agreement else None,
            trigger=Trigger(record.trigger),
        )


@dataclass(frozen=True, slots=True)
class Ack(_Json):
    """``acks/<generation>/<node>``: one node's summary of its workers in one generation.

    `in_session`: every worker has sent Hello, so that the node can change in place. `is_plain`: a worker runs no
    session and never will. `prepared`: the plan digest, once every worker of the node is prepared. `refusal`: why a
    worker cannot take part; of several, the one that most likely caused the others. `switched`: every worker is past
    the migration vote. `lost`: the node has lost its workers of this generation, because it was cut off from etcd or is
    a new instance. `has_stepped`: a worker has completed a training step. `ended`: the slot of a worker that has exited
    with code 0, after it had closed its session if it had one. `left`: the slots of workers that have exited with
    code 0 out of an open session. `step`: the first step of the generation, once known. `stop_ms`, `phases_ms`: of the
    slowest worker; bytes are sums over the node's workers. `contact`: ``host:port`` at which the node's agent answers
    other agents, also after its record has gone from etcd. `frozen`: the last answers of its workers to `Freeze`, as
    one (`freezing.frozen_here`). `failed`: every worker of the generation that has failed, of which `failure` is the
    one that most likely caused the others. `logs`: the folder of the run's logs on this node, "" where none are written
    in our order. `peer_lost`: why a worker waits for `Freeze`: an operation with its peers has failed.
    """

    generation: int
    node: str
    in_session: bool = False
    is_plain: bool = False
    prepared: str = ""
    refusal: Refusal | None = None
    switched: bool = False
    finished: bool = False
    lost: bool = False
    has_stepped: bool = False
    ended: str = ""
    left: tuple[str, ...] = ()
    failure: Failure | None = None
    step: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    referred_bytes: int = 0
    stop_ms: float | None = None
    contact: str = ""
    logs: str = ""
    frozen: Frozen | None = None
    failed: tuple[Failure, ...] = ()
    peer_lost: Refusal | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    prepare_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        ack = super(Ack, cls).from_json(value)
        failure: Any = ack.failure
        refusal: Any = ack.refusal
        frozen: Any = ack.frozen
        failed: Any = ack.failed
        peer_lost: Any = ack.peer_lost
        return replace(
            ack,
            failed=tuple(Failure.from_json(each) for each in failed),
            left=tuple(ack.left),
            peer_lost=Refusal.from_json(peer_lost) if peer_lost else None,
            frozen=Frozen(**_known(Frozen, frozen)) if frozen else None,
            failure=Failure.from_json(failure) if failure else None,
            refusal=Refusal.from_json(refusal) if refusal else None,
        )


@dataclass(frozen=True, slots=True)
class Offence(_Json):
    """A failure of a slot's worker, or the loss of a node. `name`: of the slot (``node/index``) or the node. `at`: in
    seconds since 1970."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Current(_Json):
    """``current``: what the leader has decided. Every write of the leader replaces it, fenced by its mod_revision.

    `committed`, `proposed`: generation ids, 0 for none. `next_id`: the next free id; numbers are never used twice.
    `wanted`: the text of the last accepted `control/scale`, empty for the largest that nnodes admits;
    `wanted_before`: what it goes back to if the proposed generation is withdrawn. `handled_scale`: the mod_revision
    of the last `control/scale` that was answered; `pending_scale`: that of one still to be met, else 0;
    `pending_since`: the generation that was committed when it was accepted.
    `given_up`: what the job could not change to since the last request.
    `restarts`: fresh starts after failures so far. `failed_as`, `failed_alike`: the failure before the first step, and
    how many times in a row it occurred. `unreported`: the stop time of the committed generation is not yet in its
    history.
    `loss`: the loss of workers that is being handled, if there is one. `losses`: how many there were, so the number of
    the last one. `fruitless`: recoveries from a loss since the last completed step. `recovery_ms`: of the last
    recovery, by phase, until it is in the history with the stop time. `offences`: recent failures, by which repeat
    offenders are found.
    """

    committed: int = 0
    proposed: int = 0
    phase: Phase = Phase.IDLE
    next_id: int = 1
    wanted: str = ""
    wanted_before: str = ""
    handled_scale: int = 0
    pending_scale: int = 0
    pending_since: int = 0
    given_up: tuple[GivenUp, ...] = ()
    restarts: int = 0
    failed_as: str = ""
    failed_alike: int = 0
    unreported: bool = False
    loss: Loss | None = None
    losses: int = 0
    fruitless: int = 0
    recovery_ms: dict[str, float] = field(default_factory=dict)
    offences: tuple[Offence, ...] = ()
    outcome: Outcome = Outcome.RUNNING
    exit_code: int = 0
    why: str = ""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        record = super(Current, cls).from_json(value)
        given_up: Any = record.given_up
        offences: Any = record.offences
        loss: Any = record.loss
        return replace(
            record,
            loss=Loss.from_json(loss) if loss else None,
            phase=Phase(record.phase),
            outcome=Outcome(record.outcome),
            given_up=tuple(GivenUp.from_json(each) for each in given_up),
            offences=tuple(Offence.from_json(each) for each in offences),
        )


class Result(StrEnum):
    """Of a control request. `PENDING`: it waits for nodes, or for another try. `RESTARTED`: the job has the size, but
    all workers were restarted on the way, from the script's own checkpoint if it has one."""

    ACCEPTED = "accepted"
    PENDING = "pending"
    REFUSED = "refused"
    DONE = "done"
    RESTARTED = "restarted"

    @property
    def is_final(self) -> bool:
        """Whether this is the last answer to the request."""
        return self in (Result.REFUSED, Result.DONE, Result.RESTARTED)


@dataclass(frozen=True, slots=True)
class Reply(_Json):
    """``control/reply``: the answer to the request written at `revision`."""

    request: str
    revision: int
    result: Result
    message: str
    generation: int | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        record = super(Reply, cls).from_json(value)
        return replace(record, result=Result(record.result))


@dataclass(frozen=True, slots=True)
class History(_Json):
    """``history/<generation>``: a generation's changes and costs. Times in milliseconds, of the slowest worker. `time`:
    when the record was written, in seconds since 1970. `reason`, `trigger`: of the generation."""

    generation: int
    config: str
    previous: int
    reason: str
    outcome: str
    why: str = ""
    step: int = 0
    kept: int = 0
    started: int = 0
    stopped: int = 0
    moved_bytes: int = 0
    stop_ms: float | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    prepare_ms: dict[str, float] = field(default_factory=dict)
    time: float = 0.0
    trigger: Trigger = Trigger.START

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        record = super(History, cls).from_json(value)
        return replace(record, trigger=Trigger(record.trigger))

    @property
    def is_restart(self) -> bool:
        """Whether all workers were started afresh for it, otherwise than at the start of the job."""
        return self.previous == 0 and self.trigger is not Trigger.START


@dataclass(frozen=True, slots=True)
class Request:
    """A control key as read: its text, and the mod_revision that identifies this write of it."""

    text: str
    revision: int


def slowest(phases: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Phase -> the longest time of any worker, in milliseconds."""
    longest: dict[str, float] = {}
    for each in phases:
        for name, milliseconds in each.items():
            longest[name] = max(longest.get(name, 0.0), milliseconds)
    return longest
