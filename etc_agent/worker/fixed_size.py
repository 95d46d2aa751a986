"""A job without an agent: its size never changes."""

from __future__ import annotations

import torch.distributed as dist

from etc_agent.adapters.protocol import Adapter
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.activation import run_activate
from etc_agent.worker.checkpoints.saver import Bid, Saver
from etc_agent.worker.course import Course
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.process.environment import WorkerEnvironment
from etc_agent.worker.settings import Settings
from etc_agent.worker.start import start_fresh
from etc_agent.worker.vote import Ballot
from etc_agent.worker.world.gloo import record_groups
from etc_agent.worker.world.swap import deactivate, install


class FixedSize:
    """The only generation of the job. `live`: that generation, while the session is open."""

    def __init__(
        self, environment: WorkerEnvironment, config: ParallelConfig, adapter: Adapter, settings: Settings,
        course: Course,
    ) -> None:
        self._environment = environment
        self._config = config
        self._adapter = adapter
        self._settings = settings
        self._course = course
        self._saver = Saver.of(settings, course)
        self.live: LiveGeneration | None = None

    def open(self) -> None:
        install()
        record_groups()
        self.live, self._course.step = start_fresh(self._environment, self._config, self._adapter, self._settings)
        run_activate(self.live)
        if self._saver is not None:
            self._saver.begin()

    def close(self, error: BaseException | None) -> None:
        if self._saver is not None:
            self._saver.close(error)
        live, self.live = self.live, None
        if live is not None:
            leave(live, error)

    def safe_point(self) -> None:
        """Between two steps: write a checkpoint if one is due."""
        live, saver = self.live, self._saver
        if saver is None:
            return
        assert live is not None
        assert live.vote is not None
        if saver.needs_vote(self._course.step):
            ballot = Ballot(ok=True, armed=0, checkpoint=saver.bid(self._course.step))
            saver.agree(Bid(live.vote.cast(ballot).checkpoint), live.id)
        saver.at_safe_point(live)

    def begin_step(self) -> None:
        self._course.begin_step()

    def vote(self, *, ok: bool) -> bool:
        """Whether to apply the step. Each rank decides alone, as in any script without a session."""
        return ok

    def publish(self) -> None:
        """Spread what the step has changed."""
        assert self.live is not None
        self._adapter.publish(self.live.state)

    def forgive(self, error: Exception) -> bool:
        """Whether the step can be run again after `error`: never, since nobody knows which workers are left."""
        return False

    def end_step(self) -> None:
        self._course.end_step()


def leave(live: LiveGeneration, error: BaseException | None) -> None:
    """Close the world of `live` at the end of the session, which ends because of `error`, if any."""
    try:
        if error is None:
            # A rank that exits first could lose messages of the last step that others still wait for.
            dist.barrier()
    finally:
        live.world.close()
        deactivate()
