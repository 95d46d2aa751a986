"""What a change costs one worker, as the job grows.

    python scripts/bench_scale.py [--ranks 8 64 384 ...] [--model llama3-70b]

For every size, one worker's preparation of a change is measured on the functions that a session's own preparation calls
(`etc_agent.worker.change`): the crew, what the workers tell each other, the choice of the mode, and this worker's part
of the plan. Data parallelism grows by one replica. The other workers are simulated where they meet, in the all-reduces
of the change's group: they contribute what real ones would. Each size runs in a process of its own; the worker measured
holds state that it sends, the busiest kind of worker in such a change.

`vote_ms`: the median time of a vote (`etc_agent.worker.vote`), as processes that are forked from one that has imported
torch and do nothing but vote; `ring_ms`: of gloo's all-reduce of as many bytes among the same processes, by turns.

`equal_to_make_plan`: at 64 and 384 ranks the parts of all workers together are compared with `make_plan`, transfer by
transfer. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from etc_agent.migration.modes import ModeRequest, bid_of, choose_together
from etc_agent.migration.own_plan import Change
from etc_agent.migration.transport.wire import Wire
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.planner.transfers.classes import Side, encode_class
from etc_agent.planner.transfers.instructions import Instructor
from etc_agent.planner.transfers.migration import ROUND_BYTES, ROUND_TRANSFERS, make_plan
from etc_agent.state.layout import Manifest
from etc_agent.state.model import ModelDescription
from etc_agent.state.sharding import Sharding
from etc_agent.worker.change.crew import Crew
from etc_agent.worker.change.modes.make_mode import plan_for
from etc_agent.worker.change.state.amending import amendments_of, check_carried
from etc_agent.worker.change.told import Task, tell_new_side, tell_old_side
from etc_agent.worker.data.division import GlobalBatch
from etc_agent.worker.settings import Settings
from etc_agent.worker.vote import Ballot, Vote
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.stores import raw_group
from launcher.ctl.planning.command import read_model

RANKS = (8, 64, 384, 1024, 4096, 16384)
SLOTS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A change that adds one replica. `num_ranks`: of the generation after it."""

    model: ModelDescription
    num_ranks: int

    @property
    def configs(self) -> tuple[ParallelConfig, ParallelConfig]:
        pp = 8 if self.num_ranks >= 128 else 4 if self.num_ranks >= 64 else 1
        dp = self.num_ranks // (8 * pp)
        if dp < 2:  # one node: four of eight
            return ParallelConfig(pp=1, tp=4, dp=1), ParallelConfig(pp=1, tp=4, dp=2)
        return ParallelConfig(pp=pp, tp=8, dp=dp - 1), ParallelConfig(pp=pp, tp=8, dp=dp)

    def generations(self) -> tuple[Generation, Generation]:
        """The new replica's ranks go to the slots that the old generation does not have; the others stay in place."""
        before, after = self.configs
        slots = [Slot(f"node{index // SLOTS_PER_NODE}", index % SLOTS_PER_NODE) for index in range(after.num_ranks)]
        free = iter(slots[before.num_ranks :])
        placement = []
        for rank in range(after.num_ranks):
            at = after.coordinate(rank)
            placement.append(next(free) if at.dp == before.dp else slots[before.rank(at)])
        old = Generation(1, before, tuple(slots[: before.num_ranks]), "localhost:1", 0)
        return old, Generation(2, after, tuple(placement), "localhost:1", 1)

    def shardings(self) -> tuple[Sharding, Sharding]:
        before, after = self.configs
        return Sharding(self.model, before), Sharding(self.model, after)


class SimulatedGroup:
    """The change's group as one worker sees it. All others contribute to an all-reduce what `others` has for it, in the
    order of the calls; nothing where that is None."""

    def __init__(self, rank: int, size: int, others: Sequence[torch.Tensor | None]) -> None:
        self._rank, self._size = rank, size
        self._others = iter(others)
        self.gathered_bytes = 0

    def name(self) -> str:
        return "gloo"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> SimulatedGroup:
        (tensor,) = tensors
        other = next(self._others)
        self.gathered_bytes += tensor.numel() * tensor.element_size()
        if other is not None:
            is_sum = options.reduceOp == torch.distributed.ReduceOp.SUM
            tensor.copy_(tensor + other if is_sum else torch.maximum(tensor, other))
        return self

    def wait(self, timeout: datetime.timedelta) -> bool:
        return True


def settings() -> Settings:
    return Settings(torch.device("cpu"), GlobalBatch(1 << 20), 0, 60.0, 60.0, 60.0, 60.0, None)


def first_of_each(crew: Crew, ranks: Sequence[int | None], sharding: Sharding) -> dict[object, int]:
    """The workers that tell a side: the first at each position, in the order of the workers."""
    first: dict[object, int] = {}
    for worker, rank in enumerate(ranks):
        at = None if rank is None else sharding.config.coordinate(rank)
        first.setdefault(None if at is None else (at.pp, at.tp), worker)
    return first


def told_by_others(
    crew: Crew, ranks: Sequence[int | None], sharding: Sharding, said: bytes
) -> list[torch.Tensor | None]:
    """What the other workers contribute to the three all-reduces in which a side is told."""
    values = []
    for worker in first_of_each(crew, ranks, sharding).values():
        rank = ranks[worker]
        text = said + b"\n" + encode_class(() if rank is None else sharding.manifest(rank))
        values.append(b"" if worker == crew.worker else text)
    own = next((n for n, w in enumerate(first_of_each(crew, ranks, sharding).values()) if w == crew.worker), None)
    sizes = [len(value) for value in values]
    if own is not None:
        rank = ranks[crew.worker]
        sizes[own] = len(said) + 1 + len(encode_class(() if rank is None else sharding.manifest(rank)))
        values[own] = bytes(sizes[own])
    flat = torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8)
    return [torch.tensor(sizes), flat, None]


def prepare(case: Case) -> dict[str, float]:
    """One worker's part of the preparation, measured."""
    before, after = case.shardings()
    old, new = case.generations()
    # The first worker of the second replica, or of the only one: it holds what the joining replica needs.
    slot = old.placement[old.config.tp if old.config.dp > 1 else 0]
    crew = Crew.of(slot, new, old)
    held = before.manifest(crew.old_rank or 0)
    needed = () if crew.new_rank is None else after.manifest(crew.new_rank)
    said = json.dumps(amendments_of(None), separators=(",", ":"), sort_keys=True).encode()
    said_new = json.dumps({"views": [], "refusal": None}, separators=(",", ":"), sort_keys=True).encode()
    group = SimulatedGroup(crew.worker, crew.num_workers, [
        *told_by_others(crew, crew.old_ranks, before, said), *told_by_others(crew, crew.next_ranks, after, said_new),
        None, None, None,  # mode, regions, bytes moved
    ])
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, start_cpu = time.perf_counter(), time.process_time()
    crew = Crew.of(slot, new, old)
    task = Task(new, old, crew, settings())
    told = tell_old_side(task, group, held, amendments_of(None))
    told_new = tell_new_side(task, group, needed, (), None)
    check_carried(told.said, told.names(), told_new.names())
    wire, timeout = Wire(group), datetime.timedelta(seconds=60)
    bid = bid_of(crew.worker, ModeRequest("auto", 0, 1 << 50), held, needed)
    choice = choose_together(wire, bid, timeout)
    own = plan_for(choice, wire, Change(told.described, told_new.described, held, needed, crew.nodes), timeout)
    cpu_s, seconds = time.process_time() - start_cpu, time.perf_counter() - start
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before
    return {
        "prepare_cpu_s": round(cpu_s, 4), "prepare_s": round(seconds, 4), "bytes_gathered": group.gathered_bytes,
        "peak_mib": round(peak_kib / 1024, 1), "own_transfers": sum(map(len, own.plan.rounds)),
        "own_refers": len(own.plan.refers),
    }


def is_equal_to_make_plan(case: Case) -> bool:
    """Whether the parts of all workers are the complete plan."""
    before, after = case.shardings()
    old, new = case.generations()
    crew = Crew.of(old.placement[0], new, old)
    layouts = before.layout(), after.layout()
    held: list[Manifest] = [() if rank is None else layouts[0][rank] for rank in crew.old_ranks]
    needed: list[Manifest] = [() if rank is None else layouts[1][rank] for rank in crew.next_ranks]
    forwarding = len(set(crew.nodes)) > 1
    plan = make_plan(held, needed, nodes=crew.nodes, forwarding=forwarding)
    previous, current = Side.of(held), Side.of(needed)
    expected: list[list[tuple[Any, ...]]] = [[] for _ in held]
    for number, transfers in enumerate(plan.rounds):
        for transfer in transfers:
            for worker in (transfer.source, transfer.target):
                expected[worker].append((number, transfer))
    refers: list[list[Any]] = [[] for _ in held]
    for refer in plan.refers:
        refers[refer.worker].append(refer)
    instructors = [
        Instructor(worker, previous, current, held[worker], needed[worker], crew.nodes, forwarding=forwarding)
        for worker in range(crew.num_workers)
    ]
    regions = max(each.num_regions for each in instructors)
    for worker, each in enumerate(instructors):
        own = each.plan(ROUND_BYTES, ROUND_TRANSFERS, regions, plan.digest)
        found = [(number, transfer) for number, transfers in enumerate(own.rounds) for transfer in transfers]
        if found != expected[worker] or set(own.refers) != set(refers[worker]):
            return False
    return True


def votes_ms(num_ranks: int, repeats: int = 60) -> tuple[float, float]:
    """Median milliseconds of a vote and of an all-reduce among `num_ranks` processes."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = fork.SimpleQueue()
        ranks = [
            fork.Process(target=_vote, args=(folder, rank, num_ranks, repeats, results)) for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        vote_s, ring_s = results.get()
        for rank in ranks:
            rank.join()
    return round(vote_s * 1e3, 3), round(ring_s * 1e3, 3)


def _vote(folder: str, rank: int, size: int, repeats: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", size)
    vote = Vote(torch.distributed.PrefixStore("vote", store), rank, size, 300.0, Connections())
    ring = raw_group(torch.distributed.PrefixStore("ring", store), rank, size, 300.0, Connections())
    ballot, values = Ballot(True, 1), torch.ones(4, dtype=torch.int32)
    times: dict[str, list[float]] = {"vote": [], "ring": []}
    for _ in range(repeats):
        for name, cast in (("vote", lambda: vote.cast(ballot)), ("ring", lambda: ring.allreduce([values]).wait())):
            ring.allreduce([values]).wait()  # all ranks begin together
            start = time.perf_counter()
            cast()
            times[name].append(time.perf_counter() - start)
    if rank == size - 1:  # the deepest of the tree
        results.put((statistics.median(times["vote"]), statistics.median(times["ring"])))
    ring.allreduce([values]).wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS))
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument("--compare", type=int, nargs="*", default=[64, 384], help="sizes compared with make_plan")
    parser.add_argument("--votes", type=int, nargs="*", default=[4, 16, 64], help="ranks that vote")
    arguments = parser.parse_args()
    model = read_model(arguments.model)
    spawn = multiprocessing.get_context("spawn")
    by_ranks = {}
    for num_ranks in arguments.ranks:
        with spawn.Pool(1) as pool:
            by_ranks[str(num_ranks)] = pool.apply(prepare, (Case(model, num_ranks),))
        print(f"{num_ranks:>6} ranks: {by_ranks[str(num_ranks)]}", flush=True)
    voted = {}
    for num_ranks in arguments.votes:
        voted[str(num_ranks)] = votes_ms(num_ranks)
        print(f"{num_ranks:>6} ranks: vote, all-reduce: {voted[str(num_ranks)]} ms", flush=True)
    equal = all([is_equal_to_make_plan(Case(model, num_ranks)) for num_ranks in arguments.compare])
    print(json.dumps({
        "by_ranks": by_ranks, "equal_to_make_plan": equal,
        "vote_ms": {size: vote for size, (vote, _) in voted.items()},
        "ring_ms": {size: ring for size, (_, ring) in voted.items()},
    }))


if __name__ == "__main__":
    main()
