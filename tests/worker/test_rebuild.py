"""What survivors give in place of lost workers from the blocks that they keep, over real gloo groups."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from test_copier import CPU, TIMEOUT_S, Job, Worker, job

from etc_agent.control.redundancy import Scheme
from etc_agent.integrations.json_values import decode
from etc_agent.state.boxes import whole
from etc_agent.worker.change.state.rescued import Rescued
from etc_agent.worker.redundancy import sums
from etc_agent.worker.redundancy.rebuild import Survivors, rescue
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.stores import raw_group


def rescued(running: Job, lost: Collection[int]) -> list[Rescued]:
    """What each survivor gives."""
    workers = {rank: number for number, rank in enumerate(r for r in range(len(running.workers)) if r not in lost)}
    store = dist.HashStore()

    def rescue_at(rank: int) -> Rescued:
        group = raw_group(store, workers[rank], len(workers), TIMEOUT_S, Connections())
        return rescue(running.workers[rank].newest, Survivors(group, workers, lost), CPU)

    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(rescue_at, workers))


def is_whole(worker: Worker, name: str, given: list[Rescued], step: int) -> bool:
    """Whether the parts that were given make up what `worker` had in that tensor, each element once."""
    then = worker.history[step][name]
    now, seen = torch.zeros_like(then), torch.zeros(then.shape, dtype=torch.int64)
    for each in given:
        for part, tensor in each.tensors.items():
            if part.tensor.name == name:
                at = part.box.within(whole(then.shape))
                now[at] = tensor
                seen[at] += 1
    return torch.equal(now, then) and bool((seen == 1).all())


@pytest.mark.parametrize("scheme", [Scheme.PEER, Scheme.PARITY])
@pytest.mark.parametrize(
    ("nodes", "losses"),
    [
        ([0, 1, 2], [{0}, {1}, {2}]),
        ([0, 0, 1, 1, 2, 2], [{0, 1}, {3}, {4, 5}]),
        ([0, 0, 0, 1, 2], [{0, 1, 2}, {3}, {4}]),
    ],
)
def test_survivors_give_back_all_that_a_lost_node_had_of_its_own(
    monkeypatch: pytest.MonkeyPatch, scheme: Scheme, nodes: list[int], losses: list[set[int]]
) -> None:
    monkeypatch.setattr(sums, "_MESSAGE_BYTES", 64)  # several messages for each piece, and one that is shorter
    with job(nodes, every=2, scheme=scheme) as running:
        running.until(lambda: len(steps := running.complete()) == 1 and min(steps) > 3, "a second set")
        (step,) = running.complete()
        for lost in losses:
            for _ in range(2):  # another loss may come before the recovery is over: the blocks are still there
                given = rescued(running, lost)
            for rank in lost:
                worker = running.workers[rank]
                own = [name for name in worker.history[step] if f"stage{rank}" in name]
                assert len(own) == 8, "two parameters, and two moments and a count of steps for each"
                assert all(is_whole(worker, name, given, step) for name in own)
                streams = [name for each in given for name in each.streams if name.startswith(f"rng.pp{rank}.")]
                assert streams
                (values,) = [each.values[rank] for each in given if rank in each.values]
                assert decode(values["extras"]["counter"]) == {"count": step}


def test_parity_over_four_nodes_takes_a_third_of_the_memory_of_copies() -> None:
    kept, own = {}, {}
    for scheme in (Scheme.PEER, Scheme.PARITY):
        with job([0, 1, 2, 3], every=1, scheme=scheme) as running:
            running.until(lambda running=running: -1 not in running.complete(), "a copy set")
            kept[scheme] = [sum(map(torch.numel, worker.newest.kept.values())) for worker in running.workers]
            own[scheme] = [worker.newest.own.numel() for worker in running.workers]
    for peer, parity in zip(kept[Scheme.PEER], kept[Scheme.PARITY], strict=True):
        assert abs(parity - peer / 3) < 200, "parts begin at multiples of 16 bytes"
    for peer, parity in zip(own[Scheme.PEER], own[Scheme.PARITY], strict=True):
        assert abs(parity - peer) < 200, "what is cut is there once"


def test_what_two_lost_members_of_one_group_had_is_not_given() -> None:
    with job([0, 1, 2, 3], every=1, scheme=Scheme.PARITY) as running:
        running.until(lambda: -1 not in running.complete(), "a copy set")
        assert not any(each.tensors for each in rescued(running, {1, 2}))
