"""The copier of one generation: every k steps a worker copies its state, and sends it, on a thread beside training.

    manifests -> plan -> [all ready -> a safe point: buffers are copied -> all else is copied -> exchange] ...

Each step's vote carries what this rank is ready for (`ballot`), and its minimum over all ranks starts a copy set: all
ranks copy at the same safe point, without a collective of their own on the main thread. There the main thread copies
the buffers alone: nothing writes to parameters and optimizer state before the next update, which waits for their copy.

That all are ready for set n also tells each that all have completed set n-1, so that set n-2 can be overwritten.
Whatever is lost at any moment, the survivors' newest complete sets differ by one at most, and the older one is still
there on all of them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from etc_agent.control.redundancy import Redundancy
from etc_agent.errors import EtcError, one_line
from etc_agent.integrations.train_state import TrainState
from etc_agent.migration.modes import free_bytes
from etc_agent.parallel.config import Coordinate
from etc_agent.state.layout import Manifest
from etc_agent.worker.change.exchange import gather_json
from etc_agent.worker.redundancy.copy_set import ChangedError, CopySet, Pending, held_now
from etc_agent.worker.redundancy.exchange import CopyPlan, exchange, make_plan
from etc_agent.worker.redundancy.layout import BlockLayout, OwnLayout

_log = logging.getLogger(__name__)

CHANGED: Final = -1
"""In a vote: a rank holds other shards than planned, so all plan again."""
BUSY: Final = 0
"""In a vote: a rank is planning or exchanging. Greater numbers: ready for the copy set of that number."""
_NUM_SETS: Final = 2
"""One complete, one being made."""
_CLOSE_S = 3.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """Order to the thread: agree on a plan for this rank's `manifest`."""

    manifest: Manifest


@dataclass(frozen=True, slots=True, eq=False)
class _Exchange:
    """Order to the thread: complete a copy set. `pending`: what is still to be copied of this worker's own state, None
    where that could not be copied."""

    copies: CopySet
    pending: Pending | None


class Copier:
    """See the module.

    Args:
        group: a raw gloo group over the generation's ranks, for this copier alone.
        node: the number of this worker's node.
        redundancy: the scheme, and how many steps there are from one copy set to the next.
        at: this rank's grid coordinate.

    Attributes:
        plan: who keeps what, None until all ranks have agreed on it.
        gone_back_to: the set that this worker has gone back to after a loss; nothing is copied in this generation then.
    """

    def __init__(
        self, group: dist.ProcessGroup, node: int, redundancy: Redundancy, device: torch.device, at: Coordinate
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self._rank = group.rank()
        self._node = node
        self._redundancy = redundancy
        self._device = device
        self._at = at
        self._orders: queue.SimpleQueue[_Plan | _Exchange | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._ballot = BUSY
        self._num_plans_due = 0
        self._is_planned = False
        self._has_given_up = False
        self._last_step: int | None = None
        self.plan: CopyPlan | None = None
        self._layouts: tuple[OwnLayout, Mapping[int, BlockLayout]] | None = None
        self.gone_back_to: CopySet | None = None
        self._complete: list[CopySet] = []
        self._free: list[CopySet] = []
        self._thread = threading.Thread(target=self._run, name="etc-copies", daemon=True)
        self._thread.start()

    # -- for the main thread ---------------------------------------------------------------------------------------

    @property
    def ballot(self) -> int:
        """What this rank's vote says of copies."""
        return self._ballot

    def at_safe_point(self, state: TrainState, step: int, agreed: int) -> None:
        """Between two steps: begin what is due. `step`: the next step. `agreed`: the last vote's minimum of all ranks'
        `ballot`, `BUSY` where there was none in this generation."""
        if not self._is_planned or agreed == CHANGED:
            with self._lock:
                self._is_planned, self._ballot = True, BUSY
                self._num_plans_due += 1
            self._orders.put(_Plan(tuple(held_now(state, self._device, self._at))))
        elif agreed > BUSY and (self._last_step is None or step - self._last_step >= self._redundancy.every):
            self._begin_set(state, step, agreed)

    def _begin_set(self, state: TrainState, step: int, number: int) -> None:
        assert self._ballot == number, "no rank goes on before all have begun the set"
        self._last_step, self._ballot = step, BUSY
        copies = self._take_free()
        copies.number, pending = number, None
        try:
            pending = copies.take(state, self._device, self._at, number, step)
            self._is_copied.clear()
        except EtcError as error:
            if not isinstance(error, ChangedError):
                self._has_given_up = True
                _log.exception("no further copies of the state are made in this generation")
        self._orders.put(_Exchange(copies, pending))

    def await_copied(self) -> None:
        """Wait until the copies that were begun at the last safe point are made: only then the state may be updated."""
        self._is_copied.wait()

    # -- after a loss ----------------------------------------------------------------------------------------------

    @property
    def newest(self) -> CopySet | None:
        """The newest copy set that is complete on this rank."""
        with self._lock:
            return self._complete[-1] if self._complete else None

    def of_step(self, step: int) -> CopySet | None:
        """The complete copy set of `step`, if this rank still has it."""
        with self._lock:
            return next((each for each in self._complete if each.step == step), None)

    def go_back(self, state: TrainState, step: int) -> None:
        """Put this worker's state back to what it was before `step`, for all ranks have agreed on that.

        Raises:
            EtcError: there is no complete copy set of that step, or it does not fit the state any more.
        """
        self.await_copied()
        copies = self.of_step(step)
        if copies is None:
            raise EtcError(f"this worker has no copies of step {step}; all workers have to be restarted")
        copies.restore(state, self._device, self._at)
        self.gone_back_to = copies

    def close(self) -> None:
        """Stop, and free all copies. An exchange under way is completed first where its peers are alive."""
        self._orders.put(None)
        self._thread.join(_CLOSE_S)
        with self._lock:
            self.gone_back_to = None
            self._complete.clear()
            self._free.clear()
        self._group = None

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        group = self._group
        try:
            while (order := self._orders.get()) is not None:
                assert group is not None
                if isinstance(order, _Plan):
                    self._make_plan(group, order.manifest)
                else:
                    self._complete_set(group, order)
                del order
        except RuntimeError as error:
            # A peer was lost, or left with the end of this generation: the agent's matter. What is complete stays.
            _log.info("no further copies in this generation: %s", one_line(error))
        except Exception:
            _log.exception("no further copies of the state are made in this generation")
        finally:
            self._is_copied.set()

    def _make_plan(self, group: dist.ProcessGroup, manifest: Manifest) -> None:
        newest = self.newest
        plan = make_plan(
            group, self._redundancy.scheme, manifest, self._node, newest.number if newest is not None else 0
        )
        self.plan = plan
        if not plan.is_needed:
            if self._rank == 0:
                _log.warning("every part of the state has replicas on several nodes, so no copies of it are made")
            return
        with self._lock:
            # A set that not all ranks have completed is of no use to any.
            self._complete = [each for each in self._complete if each.number <= plan.newest]
            self._free = []
        num_bytes, problem = self._allocate(plan)
        problems = [said for said in gather_json(group, problem) if said]
        if problems:
            with self._lock:
                self._free = []
            if self._rank == 0:
                _log.error("no copies of the state are made: %s", problems[0])
            return
        if self._rank == 0:
            _log.warning(
                "copies of the state are made every %d steps, in %s bytes of this worker's host memory: %s",
                self._redundancy.every, f"{num_bytes:,}", plan.in_words(),
            )
        self._set_ballot(plan.newest + 1, num_plans=1)

    def _allocate(self, plan: CopyPlan) -> tuple[int, str]:
        """Allocate the buffers of two copy sets. Returns their bytes, and why there is no memory for them, if so."""
        own, kept = self._layouts = plan.layouts(self._rank)
        num_bytes = _NUM_SETS * (own.num_bytes + sum(block.num_bytes for block in kept.values()))
        free = free_bytes(torch.device("cpu")) // plan.nodes.count(self._node)
        if num_bytes > free:
            needed = f"rank {self._rank} needs {num_bytes:,} bytes of host memory for them"
            return num_bytes, f"{needed} and has {free:,} free"
        try:
            sets = [CopySet.allocate(plan.blocks, own, kept, self._device) for _ in range(_NUM_SETS)]
        except RuntimeError as error:
            return num_bytes, f"rank {self._rank} cannot allocate {num_bytes:,} bytes for them: {one_line(error)}"
        with self._lock:
            self._free = sets
        return num_bytes, ""

    def _complete_set(self, group: dist.ProcessGroup, order: _Exchange) -> None:
        assert self.plan is not None
        if order.pending is not None:
            order.pending.finish()
            self._is_copied.set()
        copies, is_taken = order.copies, order.pending is not None
        is_complete = exchange(group, copies, is_taken=is_taken)
        with self._lock:
            if is_complete:
                self._complete.append(copies)
            else:
                self._free.append(copies)
        self._set_ballot(copies.number + 1 if is_complete else CHANGED)

    def _set_ballot(self, ballot: int, num_plans: int = 0) -> None:
        """Vote `ballot` from now on, unless a further plan is due, which then decides. `num_plans`: made just now."""
        with self._lock:
            self._num_plans_due -= num_plans
            if not self._num_plans_due:
                self._ballot = BUSY if self._has_given_up else ballot

    def _take_free(self) -> CopySet:
        """The buffers for the next set: all ranks have completed the one before it, so what is older is not needed."""
        with self._lock:
            while len(self._complete) > 1:
                oldest = self._complete.pop(0)
                if self._layouts is not None and oldest.layout is self._layouts[0]:
                    self._free.append(oldest)
            return self._free.pop()
