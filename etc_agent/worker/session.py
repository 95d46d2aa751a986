"""The session: what a training script holds while its job changes size around it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from etc_agent.control.causes import ErrorKind, kind_of
from etc_agent.control.channel import Channel
from etc_agent.control.messages import FirstStep, Position, Progress, Raised, Refused, Switched
from etc_agent.errors import ConfigRefusedError, EtcError, one_line
from etc_agent.integrations.native import TrainState
from etc_agent.migration.modes import MODES
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.change.conversation import Conversation
from etc_agent.worker.change.holdings import reshard
from etc_agent.worker.change.prepare import PreparedGeneration
from etc_agent.worker.change.retire import Retired, Retirements, spare_the_collector
from etc_agent.worker.change.switch import Switch, switch, write_switch_trace
from etc_agent.worker.context import ParallelContext, local_sample_ids
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.model import Build
from etc_agent.worker.process.environment import WorkerEnvironment
from etc_agent.worker.process.position import Whereabouts, dump_stacks_on_signal
from etc_agent.worker.settings import Record, Settings
from etc_agent.worker.start import start_fresh
from etc_agent.worker.step import Step
from etc_agent.worker.update import apply, can_apply
from etc_agent.worker.vote import Ballot
from etc_agent.worker.world.swap import deactivate, install

_log = logging.getLogger(__name__)
_PROGRESS_INTERVAL_S = 1.0
_HOLD_S = 0.2


class Session:
    """See `session`."""

    def __init__(
        self, build: Build, parallel: ParallelConfig | None, environment: WorkerEnvironment, settings: Settings
    ) -> None:
        self._build = build
        self._settings = settings
        self._environment = environment
        self._config = parallel or environment.parallel or ParallelConfig(dp=environment.world_size)
        self._live: LiveGeneration | None = None
        self._conversation: Conversation | None = None
        self._step = 0
        self._num_steps = 0
        self._pending = 0
        self._is_held = False
        self._switched: Switch | None = None
        self._retired: Retired | None = None
        self._retirements = Retirements()
        self._sample_ids: Sequence[int] = ()
        self._whereabouts = Whereabouts()
        self._step_start = self._step_end = time.perf_counter()
        self._last_progress = float("-inf")

    # -- what the script uses --------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """What `build` returned for the generation in force, with real tensors."""
        return self._now().state

    @property
    def parallel(self) -> ParallelContext:
        """This process's place in the generation in force."""
        return self._now().parallel

    @property
    def step(self) -> int:
        """The index of the next step, or of the one being run."""
        return self._step

    @property
    def generation(self) -> int:
        """The number of the generation in force."""
        return self._now().id

    def steps(self, num_steps: int) -> Iterator[Step]:
        """The job's steps from the present one up to `num_steps`, with a safe point before each and after the last.

        A worker that leaves the job ends here with `SystemExit`: nothing after the loop runs in it.
        """
        self._num_steps = num_steps
        while True:
            self._safe_point()
            if self._step >= num_steps:
                return
            self._step_start = time.perf_counter()
            self._at(Position.STEP)
            step = Step(self._commit, self._step)
            yield step
            if not step.is_committed:
                raise EtcError(f"step {step.index} was left without step.commit(); use it as: with step: ...")

    def batch(self, data: Any) -> Any:
        """This dp rank's samples of the present step, stacked, on the device.

        Step s takes the samples ``s*GB .. (s+1)*GB - 1`` of the job's endless sequence, cut over dp in order. `data` is
        indexed with these numbers; wrapping around and shuffling are its own affair.
        """
        ids = local_sample_ids(self._step, self.parallel)
        self._sample_ids = ids
        samples = [data[i] for i in ids]
        if all(isinstance(sample, torch.Tensor) for sample in samples):
            return torch.stack(samples).to(self.parallel.device, non_blocking=True)
        return _to_device(default_collate(samples), self.parallel.device)

    # -- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._connect()
            install()
            self._open()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error)

    def _connect(self) -> None:
        """First of all, so that whatever goes wrong from here on is told to the agent."""
        environment = self._environment
        if environment.socket is None:
            return
        try:
            channel = Channel.connect(environment.socket)
        except OSError as error:
            raise EtcError(f"the agent's control socket {environment.socket} does not answer: {error}") from None
        self._conversation = Conversation(
            channel, environment.slot, environment.generation, self._build, self._settings, self._in_force,
            self._whereabouts, self._retirements,
        )
        dump_stacks_on_signal()

    def _open(self) -> None:
        environment = self._environment
        if self._conversation is not None:
            spare_the_collector()
        if not environment.is_joining:
            try:
                self._live, self._step = start_fresh(environment, self._config, self._build, self._settings)
            except ConfigRefusedError as error:
                self._refuse(error)
                raise
            self._at(Position.BETWEEN)
        if self._conversation is not None:
            self._conversation.start(self._step)
            if environment.is_joining:
                prepared = self._conversation.await_armed(self._settings.timeout_s)
                self._switch_to(prepared)
                self._conversation.entered()

    def _refuse(self, error: ConfigRefusedError) -> None:
        """The model cannot have the config that it was to start with. The agent asks this worker about others before it
        stops it and starts anew."""
        if self._conversation is not None:
            _log.error("the model refuses the config to start with, and is asked about others: %s", one_line(error))
            self._conversation.start()
            refusal = Refused(self._environment.generation, one_line(error), ErrorKind.MODEL)
            self._conversation.report(refusal)
            self._conversation.await_end(self._settings.timeout_s)

    def _close(self, error: BaseException | None) -> None:
        if self._conversation is not None:
            if error is not None and _is_failure(error):
                self._conversation.introduce()
                self._conversation.report(Raised(one_line(error), kind_of(error)))
            self._conversation.close()
        live, self._live = self._live, None
        if live is not None:
            if error is None:
                # A rank that goes first must not take the last step's messages with it.
                dist.barrier()
            live.world.close()
            deactivate()

    def _now(self) -> LiveGeneration:
        if self._live is None:
            raise EtcError("the session is not open; use it as: with etc.session(build, ...) as session")
        return self._live

    # -- a step ----------------------------------------------------------------------------------------------------

    def _commit(self, step: Step, ok: bool) -> bool:
        live = self._now()
        ok = self._vote(ok=can_apply(live.state) and ok)
        apply(live.state, ok)
        self._step += 1
        if self._settings.record is not None:
            self._settings.record(step.index, self._sample_ids)
        self._step_end = time.perf_counter()
        self._at(Position.BETWEEN)
        if self._switched is not None:
            self._end_first_step()
        self._report_progress()
        return ok

    def _vote(self, *, ok: bool) -> bool:
        """Whether every rank says `ok`; the same vote finds the generation to enter next."""
        live = self._now()
        if live.vote is None:
            return ok
        assert self._conversation is not None
        self._at(Position.VOTE)
        result = live.vote.cast(Ballot(ok, self._conversation.armed()))
        if result.armed:
            self._pending = result.armed
        else:
            self._conversation.drop_withdrawn()
        return result.ok

    def _at(self, phase: str) -> None:
        self._whereabouts.enter(self._in_force(), self._step, phase)

    def _in_force(self) -> int:
        """The number of the generation in force, 0 before the first."""
        live = self._live
        return live.id if live is not None else 0

    def _report_progress(self) -> None:
        if self._conversation is None or self._step_end - self._last_progress < _PROGRESS_INTERVAL_S:
            return
        self._last_progress = self._step_end
        self._conversation.report(
            Progress(self.generation, self._step, self._num_steps, self._step_end - self._step_start)
        )

    def _end_first_step(self) -> None:
        """The first step after a switch is over: say how long it all took, and let the old generation go."""
        assert self._switched is not None
        assert self._conversation is not None
        stop_ms = (self._step_end - self._switched.start) * 1e3
        self._conversation.report(FirstStep(self.generation, self._step - 1, stop_ms))
        self._let_go()

    def _let_go(self) -> None:
        """Of the generation before this one."""
        self._switched = None
        retired, self._retired = self._retired, None
        assert retired is not None
        self._retirements.retire(retired)

    # -- a change --------------------------------------------------------------------------------------------------

    def _safe_point(self) -> None:
        self._enter_pending()
        if self._conversation is not None:
            self._conversation.at_safe_point(self.state)
        while self._is_held and self._step < self._num_steps:
            self._hold()
            self._enter_pending()

    def _enter_pending(self) -> None:
        if not self._pending:
            return
        assert self._conversation is not None
        generation, self._pending = self._pending, 0
        reshard(self.state)
        self._switch_to(self._conversation.take(generation))

    def _hold(self) -> None:
        """Too few nodes are left to train: stay here, and vote now and then for what may come instead of a step."""
        if self._switched is not None:
            _log.warning("too few nodes are left; step %d waits, and the state stays in memory", self._step)
            self._let_go()
        time.sleep(_HOLD_S)
        assert self._conversation is not None
        self._conversation.at_safe_point(self.state)
        self._vote(ok=True)
        self._at(Position.BETWEEN)
        self._step_start = self._step_end = time.perf_counter()
        self._report_progress()

    def _switch_to(self, prepared: PreparedGeneration) -> None:
        assert self._conversation is not None
        self._at(Position.SWITCH)
        outcome = switch(prepared, self._live, self._step, self._settings)
        if not outcome.is_committed:
            self._stay(prepared, outcome)
            return
        if self._live is not None:
            outcome.start = self._step_end
        old, self._live, self._step = self._live, prepared.next, outcome.step
        self._is_held = prepared.generation.is_held
        self._retirements.announce()
        self._retired = Retired(old, prepared, outcome.last_sends)
        moved = outcome.report
        assert moved is not None
        # Last: once the agent has heard this, it may ask for the next change.
        self._conversation.report(
            Switched(
                prepared.generation.id, outcome.step, outcome.phases.ms,
                moved.sent_bytes, moved.received_bytes, moved.referred_bytes,
            )
        )
        if self._settings.trace_dir is not None:
            write_switch_trace(self._settings.trace_dir, prepared, outcome)
        if self._live is None:
            raise SystemExit(0)
        self._switched = outcome
        self._at(Position.BETWEEN)

    def _stay(self, prepared: PreparedGeneration, outcome: Switch) -> None:
        """The migration's vote failed: the previous generation goes on as if nothing had been."""
        assert self._conversation is not None
        generation = prepared.generation.id
        error = outcome.error or "the migration failed on another worker"
        self._conversation.report(Refused(generation, error, outcome.kind))
        if self._live is None:
            raise SystemExit(0)
        self._retirements.announce()
        self._retirements.retire(Retired(None, prepared, outcome.last_sends, is_entered=False))
        _log.error("generation %d was not entered; training goes on in generation %d", generation, self.generation)


def _is_failure(error: BaseException) -> bool:
    """Whether a process that ends by `error` has failed, and was not only told to stop."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return isinstance(error, Exception)


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_to_device(value, device) for value in batch]
    return batch


def session(
    build: Build,
    *,
    global_batch: int = 1,
    seed: int = 0,
    parallel: ParallelConfig | str | None = None,
    record: Record | None = None,
    device: torch.device | str | None = None,
    timeout_s: float = 1800.0,
    switch_timeout_s: float = 600.0,
    abort_timeout_s: float = 60.0,
    migration: Literal["auto", "keep", "release"] = "auto",
    budget_bytes: int | None = None,
) -> Session:
    """An elastic training session, to be used as a context manager::

        with etc.session(build, global_batch=32) as session:
            for step in session.steps(1000):
                with step:
                    loss = train(session.state, session.parallel, session.batch(data))
                    step.commit()

    Under etc-run the job changes size at the safe points between steps. Under plain torchrun, or started by hand, the
    same script runs at a fixed size.

    Args:
        build: called once per generation, under the meta device and beside training, with a `ParallelContext`; returns
            this rank's `TrainState`. It must touch no process-wide state, and raises ValueError with a one-line message
            for a config that the model cannot have.
        global_batch: samples per step over all ranks; dp must divide it.
        seed: of the random streams. Under one seed every run of one config draws the same numbers.
        parallel: the config at a fixed size, like ``PP2TP2DP1``; by default ETC_PARALLEL, else data parallel alone.
        record: called after every step with its index and the ids of the samples that this dp rank trained on.
        device: where the state lives; by default the slot's GPU, or the CPU where there is none.
        timeout_s: longest wait for peers in training; the timeout of every process group.
        switch_timeout_s: longest wait for peers in a change.
        abort_timeout_s: longest wait until a change that was given up, or a generation that was left, is freed before
            the next change begins.
        migration: ``keep`` holds old and new state side by side until a change is committed; ``release`` gives the old
            one up as the new one comes, and with it the way back; ``auto`` releases only where both do not fit. The
            variable ETC_MIGRATION takes precedence.
        budget_bytes: most bytes of a worker's state during a change; by default what is free on its device. The
            variable ETC_MIGRATION_BUDGET_MB takes precedence.

    Raises:
        EtcError, ValueError: what was given cannot work; one line says why.
    """
    environment = WorkerEnvironment.read()
    if global_batch < 1:
        raise ValueError(f"global_batch must be at least 1, not {global_batch}")
    if migration not in MODES:
        raise ValueError(f"migration must be one of {', '.join(MODES)}, not {migration!r}")
    settings = Settings(
        device=_device(device, environment.local_rank),
        global_batch=global_batch,
        seed=seed,
        timeout_s=timeout_s,
        switch_timeout_s=switch_timeout_s,
        abort_timeout_s=abort_timeout_s,
        record=record,
        verify_dir=environment.verify_dir,
        trace_dir=environment.trace_dir,
        migration=environment.migration or migration,
        budget_bytes=environment.budget_mb << 20 or budget_bytes or 0,
    )
    config = ParallelConfig.parse(parallel) if isinstance(parallel, str) else parallel
    return Session(build, config, environment, settings)


def _device(given: torch.device | str | None, local_rank: int) -> torch.device:
    if given is not None:
        device = torch.device(given)
    elif torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
