"""Old tensors that get other memory between `prepare` and `run` in `keep` mode: the values that they have then move,
and nothing that the old generation or the script uses is written to."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory.shared import SharedMemory
from etc_agent.migration.memory.spans import Spans
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import Manifest, Shard
from tests.migration.processes import gloo, run_workers
from tests.migration.states import grid, logical, same_bits, slice_of, zeros

NAMES = ("a", "b", "c", "d")
SHAPE = (8, 6)
LAYOUTS = ("both", "rows", "columns", "first", "second")

Held = dict[Shard, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """By name, how each tensor lies before and after; whether old tensors lie in memory that the other worker has
    mapped; and what the script does after `prepare`: (what, to which, with which other)."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    in_shared_memory: bool
    done: tuple[tuple[str, str, str], ...]


def manifests(layouts: tuple[str, ...]) -> list[Manifest]:
    parts: list[list[Shard]] = [[], []]
    for name, layout in zip(NAMES, layouts, strict=True):
        tensor = logical(name, SHAPE, torch.float32)
        all_of_it, rows, columns = grid(tensor, (1, 1)) * 2, grid(tensor, (2, 1)), grid(tensor, (1, 2))
        cut = {"both": all_of_it, "first": all_of_it[:1], "second": [None, all_of_it[0]], "rows": rows}
        for worker, shard in enumerate(cut.get(layout, columns)):
            if shard is not None:
                parts[worker].append(shard)
    return [tuple(part) for part in parts]


def numbers(seed: int, shard: Shard) -> torch.Tensor:
    """Values that the other worker makes alike."""
    whole_ = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return whole_[shard.box.within(whole(SHAPE))].clone()


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    one.data, other.data = other.data, one.data


def in_mapped_memory(worker: int, held: Held) -> Held:
    """The tensors in an anonymous file, as a migration before this one would have left them."""
    plan = make_plan([(), tuple(held)], [tuple(held), ()])
    tensors = SharedMemory(plan, 0).tensors
    for shard, tensor in held.items():
        tensors[shard].copy_(tensor)
    return {shard: tensors[shard] for shard in held}


def rebind(case: Case, live: Held) -> list[torch.Tensor]:
    """Do what the script does. Returns the memory that it keeps for later."""
    by_name = {shard.tensor.name: (shard, tensor) for shard, tensor in live.items()}
    kept = []
    for number, (what, name, with_name) in enumerate(case.done):
        if name not in by_name:
            continue
        shard, tensor = by_name[name]
        match what:
            case "swap" | "share" if with_name in by_name and case.old[NAMES.index(name)] == case.old[
                NAMES.index(with_name)
            ]:
                other = by_name[with_name][1]
                swap(tensor, other) if what == "swap" else setattr(tensor, "data", other.data)
            case "replace":
                kept.append(tensor.data)
                tensor.data = numbers(number, shard)
            case "replace strided":
                tensor.data = numbers(number, shard).t().contiguous().t()
            case "view of a larger one":
                around = torch.cat([numbers(number, shard), numbers(number + 100, shard)])
                tensor.data = around[: len(tensor)]
                kept.append(around)
            case "one row for all":
                tensor.data = numbers(number, Shard(shard.tensor, Box((0, 0), SHAPE)))[:1, :1].expand(tensor.shape)
            case "write":
                if all(stride for stride in tensor.stride()):
                    tensor.copy_(numbers(number, shard))
            case "empty and fill" if tensor.untyped_storage().resizable() and tensor.is_contiguous():
                size = tensor.untyped_storage().nbytes()
                values = numbers(number, shard)
                if size == values.nbytes:
                    tensor.untyped_storage().resize_(0)
                    kept.append(torch.full((size,), 7, dtype=torch.uint8))
                    tensor.untyped_storage().resize_(size)
                    tensor.copy_(values)
    return kept


def run_case(case: Case, rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    old, new = manifests(case.old), manifests(case.new)
    plan = make_plan(old, new)
    live = {shard: numbers(NAMES.index(shard.tensor.name) + 1000, shard) for shard in old[rank]}
    if case.in_shared_memory:
        live = in_mapped_memory(rank, live)
    sources = {shard: tensor.detach() for shard, tensor in live.items()}
    memory = SharedMemory(plan, rank)
    targets = memory.tensors | {shard: sources[shard] for shard in new[rank] if shard in sources}
    targets |= {shard: zeros(shard) for shard in new[rank] if shard not in targets}
    group = gloo(store, "m", rank, size)
    migration = KeepingMigration(plan, rank, sources, targets, group, timeout_s=20, memory=memory)
    migration.prepare()
    kept = rebind(case, live)
    before = [(tensor, tensor.clone()) for tensor in (*kept, *live.values())]
    migration.refresh({shard: tensor.detach() for shard, tensor in live.items()})
    migration.run()
    migration.close()
    changed = [number for number, (tensor, value) in enumerate(before) if not same_bits(tensor, value)]
    return {
        "changed": changed,
        "live": {shard: tensor.clone() for shard, tensor in live.items()},
        "new": {shard: migration.targets[shard].clone() for shard in new[rank]},
        "strided": [shard for shard in new[rank] if not migration.targets[shard].is_contiguous()],
    }


def serve(rank: int, size: int, store: dist.Store) -> None:
    """Run the cases that the test puts into the store until there are no more."""
    for number in count():
        case = pickle.loads(store.get(f"case {number}"))
        if case is None:
            return
        try:
            answer: Any = run_case(case, rank, size, dist.PrefixStore(str(number), store))
        except Exception as error:
            answer = error
        store.set(f"answer {number} {rank}", pickle.dumps(answer))


@contextmanager
def serving() -> Iterator[Callable[[Case], list[dict[str, Any]]]]:
    """Two workers that run cases."""
    ports: list[int] = []
    opened = threading.Event()

    def told(port: int) -> None:
        ports.append(port)
        opened.set()

    workers = threading.Thread(target=run_workers, args=(serve, 2), kwargs={"limit_s": 120, "told_port": told})
    workers.start()
    assert opened.wait(10)
    store = dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    numbers_ = count()

    def run(case: Case) -> list[dict[str, Any]]:
        number = next(numbers_)
        store.set(f"case {number}", pickle.dumps(case))
        answers = [pickle.loads(store.get(f"answer {number} {rank}")) for rank in range(2)]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    try:
        yield run
    finally:
        store.set(f"case {next(numbers_)}", pickle.dumps(None))
        workers.join()


def expected(shard: Shard, live: list[Held]) -> torch.Tensor:
    """The oracle: put the whole tensor together from what the workers hold, and cut it again."""
    whole_ = torch.full(SHAPE, float("nan"))
    for held in live:
        for part, tensor in held.items():
            if part.tensor == shard.tensor:
                whole_[part.box.within(whole(SHAPE))] = tensor
    return whole_[shard.box.within(whole(SHAPE))]


WHAT = (
    "swap", "share", "replace", "replace strided", "view of a larger one", "one row for all", "write", "empty and fill"
)
cases = st.builds(
    Case,
    st.tuples(*[st.sampled_from(LAYOUTS)] * 4) | st.sampled_from(LAYOUTS).map(lambda layout: (layout,) * 4),
    st.tuples(*[st.sampled_from(LAYOUTS)] * 4) | st.sampled_from(LAYOUTS).map(lambda layout: (layout,) * 4),
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(WHAT), st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=6
    ).map(tuple),
)


def judge(case: Case, answers: list[dict[str, Any]]) -> None:
    live = [answer["live"] for answer in answers]
    for answer in answers:
        assert answer["changed"] == [], case
        assert answer["strided"] == [], "as prepared, so that replicas are alike"
        for shard, tensor in answer["new"].items():
            assert same_bits(tensor, expected(shard, live)), (case, shard)


def test_whatever_is_rebound_the_present_values_move_and_nothing_old_is_written() -> None:
    with serving() as run:

        @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
        @given(cases)
        def holds(case: Case) -> None:
            judge(case, run(case))

        for layout in ("both", "rows"):  # the swap for an evaluation, which corrupted both
            case = Case((layout,) * 4, (layout,) * 4, False, (("swap", "a", "b"), ("swap", "c", "d")))
            judge(case, run(case))
        holds()


class _Group:
    """Stands in for a process group where the check must fail before any message."""

    def name(self) -> str:
        return "gloo"

    def size(self) -> int:
        return 1


def test_a_new_tensor_in_memory_of_an_old_one_is_refused_by_name_where_it_would_be_written() -> None:
    old = [grid(logical(name, (4, 4), torch.float32), (1, 1))[0] for name in "ab"]
    left = Shard(old[0].tensor, Box((0, 0), (4, 2)))
    sources = {shard: slice_of(shard) for shard in old}
    plan = make_plan([tuple(old)], [(left,)])
    inside = sources[old[1]].view(-1)[:8].view(4, 2)
    with pytest.raises(MigrationError, match=r"new shard of 'a' \[0:4, 0:2\] lies in memory .* of 'b' \[0:4, 0:4\]"):
        KeepingMigration(plan, 0, sources, {left: inside}, _Group(), timeout_s=1)
    same = KeepingMigration(plan, 0, sources, {left: sources[old[0]][:, :2]}, _Group(), timeout_s=1)
    sources[old[0]] = sources[old[0]].clone()
    assert same.refresh(sources) == {old[0]}
    assert same.targets[left].data_ptr() == sources[old[0]].data_ptr(), "nothing is copied"


def test_a_tensor_that_has_lost_its_memory_is_refused_by_name() -> None:
    shard = grid(logical("w", (4, 4), torch.float32), (1, 1))[0]
    plan = make_plan([(shard,)], [(shard,)])
    for size in (0, 32):
        sources = {shard: slice_of(shard)}
        migration = KeepingMigration(plan, 0, sources, sources, _Group(), timeout_s=1)
        sources[shard].untyped_storage().resize_(size)
        with pytest.raises(MigrationError, match=rf"'w' \[0:4, 0:4\]: expected a storage .* got one of {size} bytes"):
            migration.refresh(sources)


def test_what_overlaps_is_found_among_spans_of_every_length() -> None:
    flat = torch.zeros(100)
    shards = [Shard(logical(name, (1,), torch.float32), whole((1,))) for name in "xyz"]
    spans = Spans(zip(shards, (flat[:50], flat[10:12], flat[60:70:3]), strict=True))
    parts = ((0, 1, 0), (11, 12, 0), (20, 60, 0), (50, 60, None), (61, 62, 2), (66, 67, 2), (70, 90, None))
    for start, end, found in parts:
        assert spans.overlapping(flat[start:end]) == (None if found is None else shards[found]), (start, end)
    assert spans.overlapping(flat[:0]) is None
