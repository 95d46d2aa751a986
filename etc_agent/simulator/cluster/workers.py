"""Simulated worker processes: their answers to the agent, and the generation in which they train."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import (
    Agreed,
    Armed,
    FirstStep,
    Freeze,
    Frozen,
    Message,
    PeerLost,
    Prepare,
    Prepared,
    Refused,
    Switched,
)
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.records import Failure
from etc_agent.reconfig.known.worker_view import WorkerView
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Shard


def layout_of(config: ParallelConfig) -> Layout:
    """One tensor of 48 rows, cut over pp and tp."""
    tensor, parts = LogicalTensor("w", (48, 4), "float32", 4), config.pp * config.tp
    ranks = [config.coordinate(rank) for rank in range(config.num_ranks)]
    return tuple(
        (Shard(tensor, Box(((at.pp * config.tp + at.tp) * 48 // parts, 0), (48 // parts, 4))),) for at in ranks
    )


@dataclass
class Model:
    """The behaviour of a job's workers.

    `in_session`: they can change in place; else they are plain scripts. `impossible`: config -> the reason why the
    model always refuses it. `refusing`: why workers refuse to prepare just now; "" if they do not. `is_slow`: they
    neither become ready nor refuse. `votes_down`: why a switch is voted down just now. `kind`: of both these errors.
    `stop_s`: seconds from the signal to stop until the process has ended.
    """

    in_session: bool = True
    impossible: dict[str, str] = field(default_factory=dict)
    refusing: str = ""
    is_slow: bool = False
    votes_down: str = ""
    kind: ErrorKind = ErrorKind.RAISED
    stop_s: float = 0.0

    def describe(self, config: ParallelConfig) -> Layout | str:
        return self.impossible.get(str(config)) or layout_of(config)


_COPIES_EVERY = 4
"""Steps from one copy set to the next."""


class Contradiction(AssertionError):
    """Survivors of a loss were told to continue from something that one of them cannot continue from."""


@dataclass
class Worker:
    """One process. `generation`: the one in which it trains, 0 while it waits to join one. `step`: the next one there.
    `armed`: the one to which it may switch. `completed`: the one to which it may still switch although it is frozen.
    `is_latched`: it is frozen, and takes part in no vote before it is in another generation. `began`: the first step of
    its generation; `gone_back`: the step to which it has gone back there, None where it has not. `ends_at`: when it
    will have ended, after it was told to stop."""

    view: WorkerView
    generation: int = 0
    step: int = 0
    armed: int = 0
    completed: int = 0
    is_latched: bool = False
    began: int = 0
    gone_back: int | None = None
    ends_at: float = float("inf")

    @classmethod
    def started(cls, index: int, generation: Generation, model: Model, *, joining: bool) -> Worker:
        view = WorkerView(index, generation.id, in_session=model.in_session, is_plain=not model.in_session)
        worker = cls(view, 0 if joining else generation.id)
        if generation.is_fresh and (why := model.impossible.get(str(generation.config))):
            worker.generation = 0
            worker.view = replace(view, refused={generation.id: Refused(generation.id, why, ErrorKind.MODEL)})
        return worker

    @property
    def is_running(self) -> bool:
        return self.view.is_running

    @property
    def answers(self) -> bool:
        """Whether it can be asked about the model: it trains, or the model has refused its config."""
        return self.generation > 0 or any(refused.kind is ErrorKind.MODEL for refused in self.view.refused.values())

    def hear(self, generation: int, message: Message, model: Model) -> None:
        """Handle a message of the agent."""
        self.view = replace(self.view, told=self.view.told | {(message.type, generation)})
        if isinstance(message, Prepare):
            self.prepare(model)
        elif isinstance(message, Armed):
            self.armed = generation
        elif isinstance(message, Freeze):
            self.freeze(message.loss)
        elif isinstance(message, Agreed):
            self.agree(message)

    def freeze(self, loss: int) -> None:
        self.is_latched = True
        answer = Frozen(loss, self.generation, self.step, completed=self.completed, copied=self.copied)
        self.view = replace(self.view, frozen={**self.view.frozen, loss: answer})

    def agree(self, agreed: Agreed) -> None:
        """Continue from what all survivors continue from.

        Raises:
            Contradiction: it cannot.
        """
        if self.generation != agreed.generation:
            if self.completed != agreed.generation:
                raise Contradiction(f"in {self.generation}, completed {self.completed}, told {agreed}")
            self.enter(agreed.generation, agreed.step)
            self.is_latched = True
        if agreed.from_copies:
            if agreed.step < 0 or agreed.step not in (self.copied, self.copied - _COPIES_EVERY):
                raise Contradiction(f"the newest copies are of step {self.copied}, told {agreed}")
            self.gone_back = self.copied
        elif not agreed.step - 1 <= self.step <= agreed.step:
            raise Contradiction(f"at step {self.step}, told {agreed}")
        self.step = agreed.step
        self.armed = self.completed = 0

    @property
    def copied(self) -> int:
        """The step of the newest complete copy set, -1 for none. Workers may differ by one set."""
        if self.gone_back is not None:
            return self.gone_back
        newest = self.step // _COPIES_EVERY * _COPIES_EVERY - _COPIES_EVERY
        return newest if self.generation and newest >= self.began else -1

    def lose_peer(self) -> None:
        """An operation with its peers has failed."""
        if self.view.in_session and not self.is_latched and self.generation not in self.view.peer_lost:
            message = PeerLost(self.generation, self.step, "Connection reset by peer")
            self.view = replace(self.view, peer_lost={**self.view.peer_lost, self.generation: message})

    def prepare(self, model: Model) -> None:
        """Answer for every generation that it was told to prepare and has not answered for."""
        for kind, generation in self.view.told:
            if kind != Prepare.type or generation in {**self.view.prepared, **self.view.refused}:
                continue
            if model.refusing:
                self.refuse(generation, model.refusing, model.kind)
            elif not model.is_slow:
                prepared = {**self.view.prepared, generation: Prepared(generation, "digest")}
                self.view = replace(self.view, prepared=prepared)

    def refuse(self, generation: int, why: str, kind: ErrorKind) -> None:
        self.armed = 0
        self.view = replace(self.view, refused={**self.view.refused, generation: Refused(generation, why, kind)})

    def enter(self, generation: int, step: int) -> None:
        """It is past the vote of the change to `generation`."""
        self.generation, self.step, self.armed, self.completed, self.is_latched = generation, step, 0, 0, False
        self.began, self.gone_back = step, None
        switched = {**self.view.switched, generation: Switched(generation, step, {"migrate": 1.0}, 1, 1, 1)}
        self.view = replace(self.view, switched=switched)

    def complete_step(self) -> None:
        self.step += 1
        if not self.view.has_stepped:
            self.view = replace(self.view, has_stepped=True)
        if self.generation in self.view.switched and self.generation not in self.view.first_step:
            first = {**self.view.first_step, self.generation: FirstStep(self.generation, self.step, 5.0)}
            self.view = replace(self.view, first_step=first)

    def stop(self, now: float, after_s: float) -> None:
        """It was told to end, by a signal."""
        self.ends_at = min(self.ends_at, now + after_s)

    def end(self, exit_code: int) -> None:
        self.view = replace(self.view, exit_code=exit_code)

    def fail(self, failure: Failure) -> None:
        self.view = replace(self.view, exit_code=failure.exit_code, failure=failure)
