"""The session: what a training script holds while its job changes size around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch

from etc_agent.control.checkpoint_settings import Checkpoint
from etc_agent.errors import EtcError
from etc_agent.integrations.native import TrainState
from etc_agent.migration.modes import MODES
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.batch import batch_of
from etc_agent.worker.change.elastic import Elastic
from etc_agent.worker.context import ParallelContext, local_sample_ids
from etc_agent.worker.course import Course
from etc_agent.worker.fixed_size import FixedSize
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.model import Build
from etc_agent.worker.process.environment import WorkerEnvironment
from etc_agent.worker.settings import Record, Settings
from etc_agent.worker.step import Step
from etc_agent.worker.update import apply, can_apply, forbid_step


class Session:
    """See `session`."""

    def __init__(
        self, build: Build, config: ParallelConfig, environment: WorkerEnvironment, settings: Settings
    ) -> None:
        self._build = build
        self._config = config
        self._environment = environment
        self._settings = settings
        self._course = Course()
        self._job: FixedSize | Elastic | None = None
        self._sample_ids: Sequence[int] = ()
        self._allow_step: Callable[[], None] = lambda: None

    # -- what the script uses --------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """What `build` returned for the generation in force, with real tensors."""
        return self._live().state

    @property
    def parallel(self) -> ParallelContext:
        """This process's place in the generation in force."""
        return self._live().parallel

    @property
    def step(self) -> int:
        """The index of the next step, or of the one being run."""
        return self._course.step

    @property
    def generation(self) -> int:
        """The number of the generation in force."""
        return self._live().id

    def steps(self, num_steps: int) -> Iterator[Step]:
        """The job's steps from the present one up to `num_steps`, with a safe point before each and after the last.

        A worker that leaves the job ends here with `SystemExit`: nothing after the loop runs in it.
        """
        course, job = self._course, self._open_job()
        course.num_steps = num_steps
        while True:
            job.safe_point()
            if course.step >= num_steps:
                return
            job.begin_step()
            self._allow_step = forbid_step(self.state)
            step = Step(self._commit, course.step)
            yield step
            if not step.is_committed:
                raise EtcError(f"step {step.index} was left without step.commit(); use it as: with step: ...")

    def batch(self, data: Any) -> Any:
        """This dp rank's samples of the present step, stacked, on the device.

        Step s takes the samples ``s*GB .. (s+1)*GB - 1`` of the job's endless sequence, divided over dp in order.
        `data` is indexed with these numbers; it has to wrap around and shuffle by itself.
        """
        parallel = self.parallel
        self._sample_ids = local_sample_ids(self._course.step, parallel)
        return batch_of(data, self._sample_ids, parallel.device)

    # -- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        size = FixedSize if self._environment.socket is None else Elastic
        # From here on every error is sent to the agent.
        self._job = size(self._environment, self._config, self._build, self._settings, self._course)
        try:
            self._job.open()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        job, self._job = self._open_job(), None
        job.close(error)

    def _open_job(self) -> FixedSize | Elastic:
        if self._job is None:
            raise EtcError("the session is not open; use it as: with etc.session(build, ...) as session")
        return self._job

    def _live(self) -> LiveGeneration:
        live = self._open_job().live
        assert live is not None, "an open session has a generation in force"
        return live

    def _commit(self, step: Step, ok: bool) -> bool:
        state, job = self.state, self._open_job()
        self._allow_step()
        ok = job.vote(ok=can_apply(state) and ok)
        apply(state, ok)
        if self._settings.record is not None:
            self._settings.record(step.index, self._sample_ids)
        job.end_step()
        return ok


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
    checkpoint: Checkpoint | str | None = None,
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
        abort_timeout_s: longest wait, before a change begins, for an aborted change or an old generation to be freed.
        migration: ``keep`` holds old and new state in memory together until a change is committed; ``release`` frees
            old tensors as new ones arrive, so that the change cannot be undone once it has begun; ``auto`` uses release
            only where both do not fit in memory. The variable ETC_MIGRATION takes precedence.
        budget_bytes: the most bytes that a worker's state may use during a change; by default what is free on its
            device. The variable ETC_MIGRATION_BUDGET_MB takes precedence.
        checkpoint: a folder that all nodes share, or an `etc_agent.Checkpoint`, which says how often too. Checkpoints
            of the state are written there beside training, and when all workers start afresh, the newest complete one
            takes the place of `TrainState.init`. The job file's `checkpoint` takes precedence.

    Raises:
        EtcError, ValueError: an argument is not possible; the message says why in one line.
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
        dump_dir=environment.dump_dir,
        trace_dir=environment.trace_dir,
        migration=environment.migration or migration,
        budget_bytes=environment.budget_mb << 20 or budget_bytes or 0,
        redundancy=environment.redundancy,
        checkpoint=environment.checkpoint or _checkpoint(checkpoint),
    )
    config = ParallelConfig.parse(parallel) if isinstance(parallel, str) else parallel
    config = config or environment.parallel or ParallelConfig(dp=environment.world_size)
    return Session(build, config, environment, settings)


def _checkpoint(given: Checkpoint | str | None) -> Checkpoint | None:
    return Checkpoint(given) if isinstance(given, str) else given


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
