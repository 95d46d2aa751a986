"""Workers of one host: who shares memory with whom, where messages land in it, and how they tell each other."""

from __future__ import annotations

import gc
import os
import resource
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import etc_agent
from etc_agent.migration.memory import memory_file
from etc_agent.migration.release import ReleasingMigration
from etc_agent.migration.release_plan import plan_release
from etc_agent.migration.schedule import WINDOW, schedule_for, schedules_for
from etc_agent.migration.transport.bells import Bells
from etc_agent.migration.transport.landing import area_of
from etc_agent.migration.transport.neighbours import pairs_of_hosts
from etc_agent.state.layout import Manifest
from tests.migration.processes import gloo, run_workers, values
from tests.migration.states import same_bits, slice_of
from tests.migration.test_engine import tp_layouts
from tests.migration.test_release import matrices


def migrate_between(rank: int, size: int, store: dist.Store, hosts: list[str], unreachable: int | None) -> Any:
    """Two `release` migrations, from tp2 to tp4 and back, by workers that take themselves to be on `hosts`; the memory
    of one of them cannot be mapped. With whom this one shared in each, and the descriptors left over."""
    memory_file._host_identity = lambda: hosts[rank]  # type: ignore[assignment]
    descriptors, sharing = len(os.listdir("/proc/self/fd")), []
    for name, (old, new) in {"there": matrices(12, 2, 4, 4), "back": matrices(12, 4, 2, 4)}.items():
        group = gloo(store, name, rank, size)
        sources = {shard: slice_of(shard) for shard in old[rank]}
        plan = plan_release(old, new, nodes=[sorted(set(hosts)).index(host) for host in hosts])
        migration = ReleasingMigration(plan, rank, sources, group, timeout_s=20, verify=True)
        if rank == unreachable:
            memory_file.MemoryFile.place = lambda self: f"{os.getpid()} 999999 0 0 0"  # type: ignore[method-assign]
        migration.prepare()
        report = migration.run()
        wrong = [s for s in new[rank] if s.num_bytes and not same_bits(migration.targets[s], slice_of(s))]
        assert wrong == []
        assert max(point.held_bytes for point in report.timeline) <= migration.peak_bytes <= migration.budget_bytes
        messages = [m for r in migration._party.schedule.rounds for m in (*r.sends, *r.receives)]
        sharing.append({message.peer for message in messages if message.shared})
        del migration, sources, group
        gc.collect()
    return sharing, len(os.listdir("/proc/self/fd")) - descriptors


@pytest.mark.parametrize(
    ("hosts", "unreachable", "there", "back"),
    [
        ("aaaa", None, "aaaa", "aaaa"),
        ("abbb", None, ".bbb", ".bbb"),
        ("abcd", None, "....", "...."),
        ("abbb", 2, "....", ".bbb"),  # on the way back nobody writes to worker 2
    ],
)
def test_workers_of_a_host_share_all_or_none(hosts: str, unreachable: int | None, there: str, back: str) -> None:
    outcomes = values(run_workers(migrate_between, 4, list(hosts), unreachable))
    for worker, (sharing, left_over) in enumerate(outcomes):
        for shared, expected in zip(sharing, (there, back), strict=True):
            assert bool(shared) == (expected[worker] != ".")
            assert all(expected[peer] == expected[worker] for peer in shared)
        assert left_over <= 0


def without_descriptors(rank: int, size: int, store: dist.Store, mode: str) -> list[bool]:
    """Worker 1 has one descriptor left, too few for memory and bells; then three, enough for some."""
    old, new = matrices(12, 2, 4, 4)
    right = []
    for spare in (1, 3):
        group = gloo(store, f"{mode}{spare}", rank, size)
        have = {shard: slice_of(shard) for shard in old[rank]}
        assert etc_agent.migrate({}, [], group) == {}  # its connections are made
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if rank == 1:
            highest, filled = max(int(fd) for fd in os.listdir("/proc/self/fd")), [os.dup(0)]
            while filled[-1] <= highest:
                filled.append(os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1 + spare, limits[1]))
        found = etc_agent.migrate(have, new[rank], group, mode=mode, timeout_s=20)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        if rank == 1:
            for fd in filled:
                os.close(fd)
        right.append(all(same_bits(found[shard], slice_of(shard)) for shard in new[rank]))
    return right


@pytest.mark.parametrize("mode", ["keep", "release"])
def test_where_descriptors_run_out_bytes_go_over_the_group(mode: str) -> None:
    for right in values(run_workers(without_descriptors, 4, mode)):
        assert right == [True, True]


def layouts() -> list[tuple[list[Manifest], list[Manifest]]]:
    return [matrices(24, 2, 4, 4), matrices(24, 4, 3, 4), tp_layouts(2, 4, 4)]


def test_messages_of_rounds_in_flight_never_overlap_where_they_land() -> None:
    for old, new in layouts():
        plan = plan_release(old, new)
        assert len(plan.rounds) > WINDOW
        for schedule in schedules_for(plan, pairs_of_hosts(plan, ["here"] * 4)):
            area = area_of(schedule)
            by_round: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for number, scheduled in enumerate(schedule.rounds):
                for message in scheduled.receives:
                    start = area.starts[message.peer, message.tag]
                    by_round[number].append((start, start + message.num_bytes))
            for number in sorted(by_round):
                together = sorted(span for other in range(number, number + WINDOW) for span in by_round[other])
                assert all(end <= start for (_, end), (start, _) in pairwise(together))
                assert together[-1][1] <= area.num_bytes


def test_the_schedules_of_all_workers_are_those_of_each() -> None:
    for old, new in layouts():
        plan = plan_release(old, new)
        for pairs in (frozenset(), pairs_of_hosts(plan, ["a", "b", "a", "b"])):
            assert schedules_for(plan, pairs) == [schedule_for(plan, worker, pairs) for worker in range(4)]


def connected() -> tuple[Bells, Bells]:
    one, other = Bells([1]), Bells([0])
    assert one.open_to(1, other.doors[0])
    assert other.open_to(0, one.doors[1])
    one.all_opened()
    other.all_opened()
    return one, other


def test_a_bell_is_heard_by_its_tag_whatever_rang_before() -> None:
    one, other = connected()
    for tag in (5, 1 << 24, 7):
        one.ring(1, tag)
    for tag in (7, 5, 1 << 24):
        other.wait(0, tag, 1)
    with pytest.raises(RuntimeError, match="timed out"):
        other.wait(0, 5, 0.01)


def test_who_waits_for_one_that_goes_hears_at_once_and_so_does_who_rings() -> None:
    one, other = connected()
    one.ring(1, 1)
    one.close()
    other.wait(0, 1, 60)
    with pytest.raises(RuntimeError, match="or its migration has failed"):
        other.wait(0, 2, 60)
    with pytest.raises(RuntimeError, match="worker 0 is gone"):
        other.ring(0, 1)


def test_bells_leave_no_descriptor_behind() -> None:
    gc.collect()  # what earlier tests have left in cycles
    before = len(os.listdir("/proc/self/fd"))
    pair = connected()
    assert len(os.listdir("/proc/self/fd")) == before + 4
    del pair
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_child_that_was_forked_does_not_keep_a_bell_alive() -> None:
    one, other = connected()
    ended, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    one.close()
    with pytest.raises(RuntimeError, match="or its migration has failed"):
        other.wait(0, 1, 60)
    os.close(end)
    assert os.waitpid(child, 0)[1] == 0
    os.close(ended)


def test_a_worker_that_cannot_be_opened_to_is_told_from_one_that_can() -> None:
    assert not Bells([1]).open_to(1, (os.getpid(), 999_999, 0))


def test_only_the_very_pipe_that_was_described_is_opened(tmp_path: Path) -> None:
    one, other = Bells([1]), Bells([0])
    pid, end, inode = other.doors[0]
    unread, unread_end = os.pipe()
    os.close(unread)
    assert not one.open_to(1, (pid, unread_end, inode))
    with (tmp_path / "log").open("w") as log:
        assert not one.open_to(1, (pid, log.fileno(), inode))
    os.close(unread_end)
    assert one.open_to(1, (pid, end, inode))


def test_only_the_very_file_that_was_described_is_mapped(tmp_path: Path) -> None:
    file = memory_file.MemoryFile(8192)
    described = memory_file.describe(file)
    mapped = memory_file.map_described(described)
    assert mapped is not None
    torch.frombuffer(mapped, dtype=torch.uint8).fill_(3)
    assert file.memory.part(0, 1, gives_back=False)[0] == b"\3"
    assert memory_file.map_described(memory_file.describe(None)) is None
    assert memory_file.map_described(b"") is None
    with (tmp_path / "another").open("w+b") as another:
        another.truncate(8192)
        os.dup2(another.fileno(), int(described.split()[2]))
        assert memory_file.map_described(described) is None
