"""The session: what a training script holds while its job changes size around it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import torch

from etc_agent.adapters.choose import as_adapter
from etc_agent.adapters.protocol import Adapter
from etc_agent.control.checkpoint_settings import Checkpoint
from etc_agent.errors import EtcError
from etc_agent.integrations.train_state import TrainState
from etc_agent.migration.modes import MODES
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.change.elastic import Elastic
from etc_agent.worker.clipping import Clipping
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.course import Course
from etc_agent.worker.data.batch import Microbatch, Place
from etc_agent.worker.data.division import DIVISIONS, Division, GlobalBatch, Reduction
from etc_agent.worker.data.draws import Draws
from etc_agent.worker.data.loader import Loader
from etc_agent.worker.data.stream import Factory, Stream
from etc_agent.worker.fixed_size import FixedSize
from etc_agent.worker.guarded import Guarded
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.model import Build
from etc_agent.worker.process.environment import WorkerEnvironment
from etc_agent.worker.settings import Record, Settings
from etc_agent.worker.step import Deciding, Step

_log = logging.getLogger(__name__)


class Session:
    """See `session`."""

    def __init__(
        self, build: Build | Adapter, config: ParallelConfig, environment: WorkerEnvironment, settings: Settings
    ) -> None:
        self._adapter = as_adapter(build)
        self._config = config
        self._environment = environment
        self._settings = settings
        self._course = Course()
        self._job: FixedSize | Elastic | None = None
        self._step: Step | None = None
        self._sample_ids: Sequence[int] = ()
        self._draws = Draws(settings.seed)
        self._clipping: tuple[int, Clipping] | None = None
        self._allow_step: Callable[[], None] = lambda: None

    # -- what the script uses --------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """What `build` returned for the generation in force, with real tensors."""
        return self._live().state

    @property
    def model(self) -> Any:
        """What `TrainState.activate` returned for the generation in force, else ``state.model``. After a change it is
        another one, so read it in every step."""
        return self._live().model

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

        A worker that leaves the job ends here with `SystemExit`: nothing after the loop runs in it. A step in which
        workers were lost may be run again: its `Step.is_committed` is False, and the next one has the same index.
        """
        course, job = self._course, self._open_job()
        course.num_steps = num_steps
        while True:
            job.safe_point()
            if course.step >= num_steps:
                return
            job.begin_step()
            self._allow_step = self._adapter.forbid_step(self.state)
            self._draws.begin_step()
            self._step = step = Step(Deciding(self._vote, self._apply, job.publish, job.forgive), course.step)
            yield step
            self._step = None
            self._allow_step()
            if not step.is_committed and not step.is_retried:
                raise EtcError(f"step {step.index} was left without step.commit(); use it as: with step: ...")

    def guarded(self) -> Guarded:
        """For what needs other workers between two steps, such as an evaluation, so that it survives their loss::

            with session.guarded() as guarded:
                accuracy = evaluate(session.state.model)
            if guarded.is_complete:
                print(accuracy)

        Where workers are lost in it, it is broken off, and training goes on with the next step; `Guarded.is_complete`
        says so. At a fixed size every error is raised.

        Raises:
            EtcError: the ``with step`` of the present step has not ended. Inside of it a loss is survived in any case.
        """
        if self._step is not None and not self._step.has_ended:
            raise EtcError(
                f"session.guarded() was called before the `with step` of step {self._step.index} had ended; call it "
                "after that, or leave it out: inside of `with step` the loss of a worker is survived in any case"
            )
        return Guarded(self._open_job().forgive)

    def batch(self, data: Any) -> Any:
        """This dp rank's samples of the present step, stacked, on the device.

        Step s takes the samples ``s*GB .. (s+1)*GB - 1`` of the job's endless sequence, divided over dp in order.

        Args:
            data: indexed with these numbers, so it has to wrap around and shuffle by itself; or what `loader` or
                `stream` has returned.

        Raises:
            ValueError: dp does not divide the global batch; use `microbatches`.
        """
        GlobalBatch(self._settings.global_batch.size).check(self.parallel.config)
        return self._present().batch(data)

    def microbatches(
        self, data: Any, size: int | None = None, reduction: Reduction = "mean"
    ) -> Iterator[Microbatch]:
        """This dp rank's samples of the present step in microbatches, for gradient accumulation and for any dp::

            for micro in session.microbatches(data, size=4):
                loss = mean_loss(model(micro.batch))
                (loss * micro.factor).backward()

        Every rank gets as many. Where a rank's samples have run out it gets samples with factor 0, so that it takes
        part in the collectives. With the factors, the reduced gradient is the exact mean over the global batch.

        Args:
            data: as for `batch`; a loader with its own ``batch_size`` needs no `size`.
            size: samples per microbatch, at most.
            reduction: ``mean`` where gradients are averaged over dp (DistributedDataParallel, fully_shard), ``sum``
                where they are added.
        """
        size = size if size is not None else getattr(data, "batch_size", None)
        if size is None:
            raise ValueError("session.microbatches(data, size=...) needs the number of samples per microbatch")
        if isinstance(data, Loader) and data.batch_size != size:
            raise ValueError(f"the loader has batch_size={data.batch_size}, and microbatches of {size} are asked for")
        return self._present().microbatches(data, size, reduction)

    def sample_ids(self, step: int) -> range:
        """The numbers, in the job's sequence, of the samples that this dp rank takes in `step`."""
        return replace(self._place(), step=step).ids()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of ``state.model`` so that the norm of all of them together is at most `max_norm`;
        return the norm that they had, equal on every rank. As ``torch.nn.utils.clip_grad_norm_`` does for an unsharded
        model, for every config: DTensors on different meshes, pipeline stages, weights that several stages hold under
        one name.

        Collective over all ranks, in one all-reduce. The gradients have to be reduced over dp before: a script that
        does so by hand calls it afterwards. With a gradient scaler, ``scaler.unscale_(optimizer)`` comes before.

        Raises:
            RuntimeError: the norm is not finite, with `error_if_nonfinite`.
            ValueError: a gradient is a DTensor whose parts are not summed up.
        """
        live = self._live()
        if self._clipping is None or self._clipping[0] != live.id:
            self._clipping = live.id, Clipping.of(live.state.model, live.parallel)
        return self._clipping[1].clip(max_norm, norm_type, error_if_nonfinite)

    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list], Any] | None = None,
        drop_last: bool = True,
        **options: Any,
    ) -> Loader:
        """torch's DataLoader over the job's sequence of samples. A change of size neither loses nor repeats a sample,
        and the loader's worker processes outlive it. Made before the session is opened, the workers of a rank that
        joins start while the others still train.

        In a step, ``for batch in loader`` gives this rank's samples of that step, in ``len(loader)`` microbatches of
        one size, which is at most `batch_size`; `batch` and `microbatches` take it too.

        Args:
            dataset: ``dataset[i]`` and ``len(dataset)``. Random augmentation in it is seeded with the sample's number.
            batch_size: samples per microbatch; None: all of this rank's samples of a step.
            shuffle: the seed of the order, another one in each epoch: the order of torch's
                ``DistributedSampler(dataset, seed=shuffle)``; None for the dataset's own.
            num_workers: processes that load samples beside training; 0: none.
            drop_last: each epoch takes whole global batches; with False the next epoch begins in the middle of a step.
            options: of torch's DataLoader, such as ``pin_memory``, ``prefetch_factor``, ``multiprocessing_context``.

        Raises:
            TypeError, ValueError: the dataset has no length or no index, or is smaller than a global batch.
        """
        return Loader(
            dataset, self._settings.global_batch.size, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last,
            num_workers=num_workers, collate_fn=collate_fn, seed=self._settings.seed, options=options,
            present=self._present,
        )

    def randint(self, high: int, size: Sequence[int]) -> torch.Tensor:
        """As ``torch.randint(high, size)``, on the CPU, with one number for each of this dp rank's next samples: it
        depends on the sample's place in the job's sequence and the seed alone, so that random offsets into a file of
        tokens are the same at every size of the job. In a step as many are drawn as this rank has samples; each new
        step begins with its first.

        Raises:
            ValueError: more are drawn than this rank has samples in a step, or dp does not divide the global batch.
        """
        GlobalBatch(self._settings.global_batch.size).check(self.parallel.config)
        return self._draws.take(self._present().ids(), high, tuple(size))

    def stream(self, factory: Factory) -> Stream:
        """Samples for `batch` from iterators. ``factory(start, rank, size)`` returns an iterator over the samples
        ``start + rank``, ``start + rank + size``, ...; it is called again after every change of dp, with the first
        sample that was not trained on."""
        return Stream(factory)

    # -- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        size = FixedSize if self._environment.socket is None else Elastic
        # From here on every error is sent to the agent.
        self._job = size(self._environment, self._config, self._adapter, self._settings, self._course)
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
        step = self._step if isinstance(job, Elastic) else None
        if error is not None and step is not None and (advice := step.advice(error)):
            _log.error("%s", advice)
        job.close(error)

    def _open_job(self) -> FixedSize | Elastic:
        if self._job is None:
            raise EtcError("the session is not open; use it as: with etc.session(build, ...) as session")
        return self._job

    def _place(self) -> Place:
        parallel = self.parallel
        return Place(
            self._settings.global_batch, self._course.step, parallel.coordinate.dp, parallel.config.dp, parallel.device
        )

    def _present(self) -> Place:
        """The place whose samples the present step trains on."""
        place = self._place()
        self._sample_ids = place.ids()
        return place

    def _vote(self, ok: bool) -> bool:
        self._draws.check(self._sample_ids)
        self._allow_step()
        return self._open_job().vote(ok=self._adapter.prepare(self.state) and ok)

    def _apply(self, step: Step, ok: bool) -> None:
        self._adapter.apply(self.state, ok)
        if self._settings.record is not None:
            self._settings.record(step.index, self._sample_ids)
        self._open_job().end_step()

    def _live(self) -> LiveGeneration:
        live = self._open_job().live
        assert live is not None, "an open session has a generation in force"
        return live


def session(
    build: Build | Adapter,
    *,
    global_batch: int = 1,
    division: Division = "equal",
    seed: int = 0,
    parallel: ParallelConfig | str | None = None,
    record: Record | None = None,
    device: torch.device | str | None = None,
    timeout_s: float = 1800.0,
    switch_timeout_s: float = 600.0,
    abort_timeout_s: float = 60.0,
    loss_timeout_s: float = 60.0,
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
        build: a function, or an adapter around one (`etc_agent.adapters`). Called once per generation, under the meta
            device and beside training, with a `ParallelContext`; returns this rank's `TrainState`. It must touch no
            process-wide state, and raises ValueError with a one-line message for a config that the model cannot have.
        global_batch: samples per step over all ranks.
        division: of the global batch over dp: ``equal``, where dp must divide it, or ``weighted``, which admits any dp
            up to the global batch and needs `Session.microbatches`.
        seed: of the random streams. Under one seed every run of one config draws the same numbers.
        parallel: the config at a fixed size, like ``PP2TP2DP1``; by default ETC_PARALLEL, else data parallel alone.
        record: called after every step with its index and the ids of the samples that this dp rank trained on.
        device: where the state lives; by default the slot's GPU, or the CPU where there is none.
        timeout_s: longest wait for peers in training; the timeout of every process group.
        switch_timeout_s: longest wait for peers in a change.
        abort_timeout_s: longest wait, before a change begins, for an aborted change or an old generation to be freed.
        loss_timeout_s: longest wait, after an operation with other workers has failed, for the agent to say that
            workers were lost; then the error is raised. A lost machine is noticed when its lease ends: be longer.
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
    if division not in DIVISIONS:
        raise ValueError(f"division must be one of {', '.join(DIVISIONS)}, not {division!r}")
    settings = Settings(
        device=_device(device, environment.local_rank),
        global_batch=GlobalBatch(global_batch, division),
        seed=seed,
        timeout_s=timeout_s,
        switch_timeout_s=switch_timeout_s,
        abort_timeout_s=abort_timeout_s,
        loss_timeout_s=loss_timeout_s,
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
