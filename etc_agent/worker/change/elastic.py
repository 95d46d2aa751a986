"""A job under an agent: the generation in force, and the switch to the next one at a safe point.

Everything in this module runs on the main thread. Whatever runs beside training is behind `Conversation`.
"""

from __future__ import annotations

import logging
import time

from etc_agent.adapters.protocol import Adapter
from etc_agent.control.causes import ErrorKind, kind_of
from etc_agent.control.channel import Channel
from etc_agent.control.messages import Closed, FirstStep, Position, Progress, Raised, Refused, Switched
from etc_agent.errors import ConfigRefusedError, EtcError, one_line
from etc_agent.parallel.config import ParallelConfig
from etc_agent.torch_private.compiler import allow_recompilations
from etc_agent.worker.activation import run_activate, settle
from etc_agent.worker.change.conversation import Conversation
from etc_agent.worker.change.errors import SwitchError
from etc_agent.worker.change.prepared import PreparedGeneration
from etc_agent.worker.change.retire import Retired, Retirements, exclude_from_collection
from etc_agent.worker.change.switch import Switch, enter, switch, write_switch_trace
from etc_agent.worker.checkpoints.saver import Bid, Saver
from etc_agent.worker.course import Course
from etc_agent.worker.fixed_size import leave
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.loss.frozen import CONSEQUENCES, FrozenWait
from etc_agent.worker.loss.latch import Latch, Seen
from etc_agent.worker.loss.orphan import Orphan
from etc_agent.worker.loss.survival import Survival
from etc_agent.worker.process.environment import WorkerEnvironment
from etc_agent.worker.process.position import Whereabouts, dump_stacks_on_signal
from etc_agent.worker.process.signals import LeftToAgent
from etc_agent.worker.redundancy.copier import BUSY, Copier
from etc_agent.worker.settings import Settings
from etc_agent.worker.start import start_fresh
from etc_agent.worker.vote import Ballot
from etc_agent.worker.world.gloo import record_groups
from etc_agent.worker.world.swap import install, present_connections
from etc_agent.worker.world.waits import free_waits

_log = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 1.0
_HOLD_S = 0.2
"""Between two votes while too few nodes are left to train."""


class Elastic:
    """The generations of a job, one after the other. `live`: the one in force, None before a joiner's first.

    Raises:
        EtcError: the agent does not answer.
    """

    def __init__(
        self, environment: WorkerEnvironment, config: ParallelConfig, adapter: Adapter, settings: Settings,
        course: Course,
    ) -> None:
        assert environment.socket is not None
        try:
            channel = Channel.connect(environment.socket)
        except OSError as error:
            raise EtcError(f"the agent's control socket {environment.socket} does not answer: {error}") from None
        self._environment = environment
        self._config = config
        self._adapter = adapter
        self._settings = settings
        self._course = course
        self._whereabouts = Whereabouts()
        self._retirements = Retirements()
        self._saver = Saver.of(settings, course)
        self._latch = Latch()
        self._orphan = Orphan()
        self._conversation = Conversation(
            channel, environment.slot, environment.generation, adapter, settings, self._latch, self._cut,
            self._whereabouts, self._retirements, self._finish, self._copied, self._orphan.agent_gone,
        )
        frozen = FrozenWait(
            self._latch, self._conversation.send, lambda: self._conversation.is_over, settings.loss_timeout_s
        )
        self._survival = Survival(self._latch, frozen, course, lambda: self.live)
        self._signals: LeftToAgent | None = None
        self.live: LiveGeneration | None = None
        self._pending = 0
        self._copies_agreed = BUSY
        self._is_held = False
        self._has_ended = False
        self._entered: tuple[Switch, Retired] | None = None
        self._last_progress = float("-inf")

    # -- life ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Enter the first generation: a fresh one, or the one that this worker joins."""
        dump_stacks_on_signal()
        install()
        record_groups()
        is_gloo = self._settings.device.type == "cpu"
        free_waits(lambda: present_connections().waits if is_gloo else None)
        exclude_from_collection()
        if self._environment.is_joining:
            self._conversation.start()
            self._signals = LeftToAgent(self._conversation.send)
            self._switch_to(self._conversation.await_armed(self._settings.timeout_s))
            self._recover()
            if self._saver is not None:
                self._saver.join()
        else:
            self._start_fresh()
            self._latch.record(Seen(self._in_force(), self._course.step))
            if self._saver is not None:
                self._saver.begin()
            self._at(Position.BETWEEN)
            self._conversation.start(self._course.step)
            self._signals = LeftToAgent(self._conversation.send)

    def _start_fresh(self) -> None:
        environment = self._environment
        try:
            self.live, self._course.step = start_fresh(environment, self._config, self._adapter, self._settings)
            run_activate(self.live)
            self._begin_copies(self.live, environment.node)
        except ConfigRefusedError as error:
            self._refuse(error)
            raise

    def _refuse(self, error: ConfigRefusedError) -> None:
        """The model refuses the config that it was to start with. The agent asks this worker about other configs, then
        stops it and restarts all workers."""
        _log.error("the model refuses the config to start with, and is asked about others: %s", one_line(error))
        self._conversation.start()
        self._conversation.send(Refused(self._environment.generation, one_line(error), ErrorKind.MODEL))
        self._conversation.await_end(self._settings.timeout_s)

    def close(self, error: BaseException | None) -> None:
        """End the session, because of `error` if there is one."""
        self._orphan.close()
        if self._signals is not None:
            self._signals.close()
        if error is not None and _is_failure(error):
            self._conversation.introduce()
            self._conversation.send(Raised(one_line(error), kind_of(error)))
        elif self._course.step_s:
            self._conversation.send(self._progress())
        if self._saver is not None:
            self._saver.close(error)
        if error is None:
            self._conversation.send(Closed())
        self._conversation.close()
        live, self.live = self.live, None
        if live is not None:
            if live.copier is not None:
                live.copier.close()
            self._leave(live, error)

    def _leave(self, live: LiveGeneration, error: BaseException | None) -> None:
        try:
            leave(live, error)
        except RuntimeError as lost:
            if not self._has_ended:
                raise
            _log.warning("a worker was lost after the last step: %s", one_line(lost))

    # -- steps -----------------------------------------------------------------------------------------------------

    def safe_point(self) -> None:
        """Between two steps: enter the generation for which the last vote found every rank armed, if any."""
        self._course.reach_safe_point()
        self._between_steps()
        while self._is_held and self._course.step < self._course.num_steps:
            self._hold()
            self._between_steps()
        while self._course.step >= self._course.num_steps and not self._has_ended:
            self._end()
            self._between_steps()

    def _end(self) -> None:
        """No step is left. A last vote: where all have come here, nobody needs this worker any more."""
        try:
            self._cast(ok=True, next_step=self._course.step)
            self._has_ended = not self._pending
        except RuntimeError as error:
            self._survival.meet_between_steps(error)

    def begin_step(self) -> None:
        assert self.live is not None
        self._has_ended = False
        self._survival.begin_step(self.live)
        self._course.begin_step()
        self._at(Position.STEP)

    def vote(self, *, ok: bool) -> bool:
        """Return whether every rank votes `ok`; the same vote finds the generation to enter next.

        Raises:
            StepRetriedError: workers were lost, and the step is to be run again.
        """
        self._at(Position.VOTE)
        try:
            ok = self._cast(ok, self._course.step + 1)
        except RuntimeError as error:
            ok = self._survival.result_after(error)
        else:
            self._survival.has_voted()
        self._await_copied()
        return ok

    def publish(self) -> None:
        """Spread what the step has changed. Where workers were lost, the generation that follows does it."""
        assert self.live is not None
        if not self._survival.is_recovering:
            self._adapter.publish(self.live.state)

    def forgive(self, error: Exception) -> bool:
        """Whether the step, which has ended by `error`, was broken off by a loss of workers. Code after the vote may
        have raised it too; then nothing is run again."""
        return self._survival.forgive(error)

    def _cast(self, ok: bool, next_step: int) -> bool:
        """One vote; `next_step` is the next one when its result is known.

        Raises:
            RuntimeError: a rank was lost, or this worker is frozen.
        """
        live = self.live
        assert live is not None
        assert live.vote is not None
        copies = live.copier.ballot if live.copier is not None else BUSY
        bid = self._saver.bid(next_step) if self._saver is not None else Bid.NOTHING
        result = live.vote.cast(Ballot(ok, self._conversation.armed(), copies, bid))
        self._latch.record(Seen(live.id, next_step, result.ok))
        self._copies_agreed = result.copies
        if result.armed:
            self._pending = result.armed
        else:
            self._conversation.drop_withdrawn()
        if self._saver is not None:
            # Workers that join have not voted, so they know of no checkpoint.
            self._saver.agree(Bid.NOTHING if result.armed else Bid(result.checkpoint), live.id)
        return result.ok

    def end_step(self) -> None:
        course = self._course
        course.end_step()
        self._at(Position.BETWEEN)
        if self._entered is not None:
            stop_ms = (course.ended - self._entered[0].start) * 1e3
            self._conversation.send(FirstStep(self._in_force(), course.step - 1, stop_ms))
            self._retire_previous()
        self._send_progress()

    def _between_steps(self) -> None:
        assert self.live is not None
        generation, self._pending = self._pending, 0
        if generation and not self._survival.is_recovering and self._settled(self.live):
            prepared = self._conversation.take(generation)
            if prepared is not None:
                self._switch_to(prepared)
        self._recover()
        self._conversation.at_safe_point(self.live)
        # Not before the first step after a switch: that step is part of the measured stop.
        if self.live.copier is not None and self._entered is None:
            self.live.copier.at_safe_point(self.live.state, self._course.step, self._copies_agreed)
            self._copies_agreed = BUSY
        if self._saver is not None:
            self._saver.at_safe_point(self.live)

    def _settled(self, live: LiveGeneration) -> bool:
        """Bring the state into the form in which it moves. False where workers were lost meanwhile."""
        self._adapter.rest(live.state)
        try:
            settle(live)
        except RuntimeError as error:
            self._survival.meet_between_steps(error)
            return False
        return True

    def _await_copied(self) -> None:
        """The state is about to be updated, or to move: what is being copied of it has to be copied before."""
        if self.live is not None and self.live.copier is not None:
            self.live.copier.await_copied()

    def _begin_copies(self, live: LiveGeneration, node: int) -> None:
        """`node`: the number of this worker's node in the generation."""
        settings = self._settings
        if live.copies is not None:
            at = live.parallel.coordinate
            live.copier = Copier(live.copies, node, settings.redundancy, settings.device, at)

    def _recover(self) -> None:
        """Where workers were lost: wait, frozen, for the generation that follows, and enter it."""
        assert self.live is not None
        while self._survival.is_recovering or self._latch.is_closed:
            if self._latch.is_closed:
                self._survival.meet_between_steps(None)
            if self._entered is not None:
                self._retire_previous()
            self._at(Position.SWITCH)
            prepared = self._conversation.await_recovery(self.live)
            if prepared is not None:
                self._switch_to(prepared)

    def _hold(self) -> None:
        """Too few nodes are left to train: stay here, and vote now and then for what may come instead of a step."""
        if self._entered is not None:
            _log.warning("too few nodes are left; step %d waits, and the state stays in memory", self._course.step)
            self._retire_previous()
        time.sleep(_HOLD_S)
        try:
            self._cast(ok=True, next_step=self._course.step)
        except RuntimeError as error:
            self._survival.meet_between_steps(error)
        self._at(Position.BETWEEN)
        self._course.stand_still()
        self._send_progress()

    # -- a change --------------------------------------------------------------------------------------------------

    def _switch_to(self, prepared: PreparedGeneration) -> None:
        self._at(Position.SWITCH)
        self._await_copied()
        outcome = self._switched(prepared)
        if not outcome.is_committed:
            self._stay(prepared, outcome)
            return
        if self.live is not None:
            outcome.start = self._course.ended
        self._retirements.announce()
        retired = Retired(self.live, prepared, outcome.last_sends)
        self._survival.forget()
        self.live, self._course.step = prepared.next, outcome.step
        self._is_held, self._copies_agreed = prepared.generation.is_held, BUSY
        self._conversation.has_switched()
        lost = self._activate(self.live, outcome) if self.live is not None and not self._is_held else None
        # After this message the agent may ask for the next change.
        self._send_switched(prepared, outcome)
        if self.live is None:
            raise SystemExit(0)
        self._begin_copies(self.live, prepared.generation.nodes.index(prepared.slot.node))
        self._entered = outcome, retired
        self._at(Position.BETWEEN)
        if lost is not None:
            self._survival.meet_between_steps(lost)
        elif prepared.generation.lost:
            self._publish_again()

    def _publish_again(self) -> None:
        """A loss may have broken off what followed the last update."""
        assert self.live is not None
        try:
            self._adapter.publish(self.live.state)
        except RuntimeError as error:
            self._survival.meet_between_steps(error)

    def _activate(self, live: LiveGeneration, outcome: Switch) -> Exception | None:
        """The error by which it ends, where that may be the consequence of a loss: the next generation activates its
        own model."""
        allow_recompilations()
        if live.state.activate is None:
            return None
        try:
            with outcome.phases.phase("activate"):
                run_activate(live)
        except Exception as error:
            if not self._latch.is_closed and kind_of(error) not in CONSEQUENCES:
                raise
            return error
        return None

    def _switched(self, prepared: PreparedGeneration) -> Switch:
        """How the switch to `prepared` has ended."""
        live, outcome = self.live, Switch(self._course.step)
        old_vote = live.vote if live is not None and not self._survival.is_recovering else None
        try:
            switch(prepared, live, old_vote, self._latch, outcome, self._settings)
        except SwitchError as error:
            if self._survival.enters_after(error, prepared.generation.id, outcome.step):
                enter(prepared, outcome, self._settings)
            else:
                outcome.error = one_line(error)
            return outcome
        if outcome.is_committed:
            self._survival.is_recovering = False
        return outcome

    def _stay(self, prepared: PreparedGeneration, outcome: Switch) -> None:
        """The vote has failed: the previous generation continues as if no change had been tried."""
        generation = prepared.generation.id
        self._conversation.has_switched()
        error = outcome.error or "the migration failed on another worker"
        self._conversation.send(Refused(generation, error, outcome.kind))
        if self.live is None:
            raise SystemExit(0)
        self._retirements.announce()
        self._retirements.retire(Retired(None, prepared, outcome.last_sends, is_entered=False))
        what = "waits for the next" if self._survival.is_recovering else "goes on"
        _log.error("generation %d was not entered; training %s in generation %d", generation, what, self._in_force())

    def _retire_previous(self) -> None:
        """Free the generation before this one, after the first step in the new one: that step is still part of the
        measured stop, and until then the script's variables refer to the old state."""
        assert self._entered is not None
        (_, retired), self._entered = self._entered, None
        self._retirements.retire(retired)

    # -- what the agent is told ------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """The job stops, after a last checkpoint. Called from the control thread."""
        if self._saver is not None:
            self._saver.end()

    def _in_force(self) -> int:
        """The number of the generation in force, 0 before the first."""
        return self.live.id if self.live is not None else 0

    def _cut(self) -> None:
        """Cut the connections of the generation in force. Called from the control thread."""
        live = self.live
        if live is not None:
            live.cut()
        if self._saver is not None:
            self._saver.abandon()

    def _at(self, phase: str) -> None:
        self._whereabouts.enter(self._in_force(), self._course.step, phase)

    def _copied(self) -> int:
        """The step of the newest copy set that is complete here, -1 for none. Also called from the control
        thread."""
        live = self.live
        copier = live.copier if live is not None else None
        copies = copier.newest if copier is not None else None
        return copies.step if copies is not None else -1

    def _send_progress(self) -> None:
        course = self._course
        if course.ended - self._last_progress < _PROGRESS_INTERVAL_S:
            return
        self._last_progress = course.ended
        self._conversation.send(self._progress())

    def _progress(self) -> Progress:
        course = self._course
        return Progress(self._in_force(), course.step, course.num_steps, course.tell(), self._copied())

    def _send_switched(self, prepared: PreparedGeneration, outcome: Switch) -> None:
        moved = outcome.report
        assert moved is not None
        self._conversation.send(
            Switched(
                prepared.generation.id, outcome.step, outcome.phases.ms,
                moved.sent_bytes, moved.received_bytes, moved.referred_bytes,
            )
        )
        if self._settings.trace_dir is not None:
            write_switch_trace(self._settings.trace_dir, prepared, outcome)


def _is_failure(error: BaseException) -> bool:
    """Whether a process that ends by `error` has failed, rather than being told to stop."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return isinstance(error, Exception)
