"""From the manifests of all workers, by class, to this worker's part of the plan, agreed with the others.

No worker makes the plan of all: each derives its own part by rule (`transfers.instructions`). Three numbers are
agreed: in how many regions any worker takes part; in `release` mode also what the size of rounds depends on; and the
bytes that move in all. A worker that cannot make its part tells the others why.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from etc_agent.migration.release_plan import (
    budget_for,
    expected_peak_bytes,
    headroom_of,
    largest_that_fits,
    round_sizes,
)
from etc_agent.migration.transport.wire import Wire
from etc_agent.planner.errors import PlanError
from etc_agent.planner.transfers.classes import ManifestClass, Side
from etc_agent.planner.transfers.instructions import Instructor
from etc_agent.planner.transfers.migration import ROUND_BYTES, ROUND_TRANSFERS
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.layout import Manifest


@dataclass(frozen=True, slots=True)
class Described:
    """Every worker's manifest in one generation. `texts`: of each class, as `encode_class` writes them. `class_of`:
    worker -> its class. `places`: worker -> its place in the grid."""

    texts: tuple[bytes, ...]
    class_of: tuple[int, ...]
    places: tuple[str | None, ...] = ()

    def side(self) -> Side:
        return Side([ManifestClass.decoded(text) for text in self.texts], self.class_of, self.places)

    def digest(self) -> bytes:
        texts = [hashlib.sha256(text).digest() for text in self.texts]
        return hashlib.sha256(repr((texts, self.class_of, self.places)).encode()).digest()


@dataclass(frozen=True, slots=True)
class Change:
    """What a plan is made for, as one worker knows it. `held`, `needed`: its own manifests. `nodes`: worker -> number
    of its node; None where that is not known: each may be on a node of its own, or share memory with any other."""

    previous: Described
    current: Described
    held: Manifest
    needed: Manifest
    nodes: Sequence[int] | None

    def digest(self) -> str:
        """Of what all workers derive their parts from; equal on every worker."""
        text = repr((self.previous.digest(), self.current.digest(), None if self.nodes is None else tuple(self.nodes)))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """`plan`: this worker's part. `moved_bytes`: what all workers send."""

    plan: MigrationPlan
    moved_bytes: int


def plan_to_keep(wire: Wire, change: Change, timeout: datetime.timedelta, *, forwarding: bool) -> OwnPlan:
    """For `keep` mode. Collective.

    Raises:
        PlanError: as for `make_plan`; the same on every worker.
        RuntimeError: a worker was lost, or does not answer in time.
    """
    instructor, (regions,) = _agreed(wire, change, timeout, forwarding=forwarding)
    return _with_total(wire, instructor.plan(ROUND_BYTES, ROUND_TRANSFERS, regions, change.digest()), timeout)


def plan_to_release(
    wire: Wire, change: Change, budget_bytes: int | None, timeout: datetime.timedelta
) -> OwnPlan:
    """For `release` mode: the largest rounds with which every worker stays inside its budget. Collective. Where no
    rounds fit, the plan has the smallest ones, and `ReleasingMigration.prepare` says who lacks how much.

    Args:
        budget_bytes: of this worker; None for its `default_budget_bytes`.

    Raises:
        PlanError, RuntimeError: as for `plan_to_keep`.
    """
    budget_bytes = budget_for(change.held, change.needed, budget_bytes)
    headroom, largest = headroom_of(change.held, change.needed, budget_bytes)
    instructor, (regions, negative, largest) = _agreed(wire, change, timeout, -headroom, largest, forwarding=False)
    sizes = round_sizes(-negative, largest)
    digest = change.digest()

    def planned(round_bytes: int) -> MigrationPlan:
        return instructor.plan(round_bytes, ROUND_TRANSFERS, regions, digest)

    def fits(round_bytes: int) -> bool:
        return expected_peak_bytes(planned(round_bytes), wire.rank, change.held, change.nodes) <= budget_bytes

    (index,) = wire.maximum([largest_that_fits(sizes, fits)], timeout)
    return _with_total(wire, planned(sizes[index]), timeout)


def _agreed(
    wire: Wire, change: Change, timeout: datetime.timedelta, *others: int, forwarding: bool
) -> tuple[Instructor, list[int]]:
    """This worker's instructor; the largest number of regions, and of each of `others`, over all workers."""
    instructor = error = None
    try:
        instructor = Instructor(
            wire.rank, change.previous.side(), change.current.side(), change.held, change.needed,
            range(wire.size) if change.nodes is None else change.nodes, forwarding=forwarding,
        )
    except PlanError as caught:
        error = caught
    first = 0 if error is None else wire.size - wire.rank
    failed, *numbers = wire.maximum([first, instructor.num_regions if instructor else 0, *others], timeout)
    if failed:
        why = wire.broadcast_bytes(wire.size - failed, str(error).encode(), timeout).decode()
        raise error or PlanError(why)
    assert instructor is not None
    return instructor, numbers


def _with_total(wire: Wire, plan: MigrationPlan, timeout: datetime.timedelta) -> OwnPlan:
    sent = sum(t.num_bytes for transfers in plan.rounds for t in transfers if t.source == wire.rank)
    total = wire.total(torch.tensor([sent], dtype=torch.int64, device=wire.device), timeout)
    return OwnPlan(plan, int(total.item()))
