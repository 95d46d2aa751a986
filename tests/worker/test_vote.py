"""The vote's tree: every rank has the result of all, and a rank that is missing leaves nobody waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from etc_agent.torch_private.gloo_works import replace_wait
from etc_agent.worker.vote import Ballot, Vote, place_in_tree
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.waits import free_waits


@pytest.fixture(autouse=True)
def waits_are_freeable() -> Iterator[None]:
    free_waits(lambda: None)
    yield
    replace_wait(lambda wait: wait)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 64, 65, 100, 513])
def test_the_tree_has_every_rank_once_and_its_depth_is_logarithmic(size: int) -> None:
    places = [place_in_tree(rank, size) for rank in range(size)]
    assert places[0][0] is None
    assert sorted(child for _, children in places for child in children) == list(range(1, size))
    assert all(places[child][0] == rank for rank, (_, children) in enumerate(places) for child in children)
    depth = [0] * size
    for rank in range(1, size):
        depth[rank] = depth[places[rank][0] or 0] + 1
    assert max(depth) <= len(f"{max(1, size - 1):o}")
    assert max(len(children) for _, children in places) <= 7 * len(f"{max(1, size - 1):o}")


def test_ranks_of_a_node_meet_before_nodes_do() -> None:
    assert [place_in_tree(rank, 24)[0] for rank in range(24)] == [None, *[0] * 7, 0, *[8] * 7, 0, *[16] * 7]


class Ranks:
    """The votes of all ranks of a generation, in threads of this process."""

    def __init__(self, size: int) -> None:
        store = dist.HashStore()
        self.connections = [Connections() for _ in range(size)]
        self.votes: list[Vote] = [None] * size  # type: ignore[list-item]

        def make(rank: int) -> None:
            self.votes[rank] = Vote(store, rank, size, 60.0, self.connections[rank])

        self._together(make, range(size))

    def cast(self, ballots: dict[int, Ballot]) -> dict[int, Ballot | Exception]:
        found: dict[int, Ballot | Exception] = {}

        def vote(rank: int) -> None:
            try:
                found[rank] = self.votes[rank].cast(ballots[rank])
            except RuntimeError as error:
                found[rank] = error

        self._together(vote, ballots)
        return found

    def _together(self, work: object, ranks: object) -> None:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]  # type: ignore[arg-type, attr-defined]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def test_every_rank_has_the_smallest_of_everything_in_vote_after_vote() -> None:
    ranks = Ranks(10)
    for spoiler in (0, 3, 9):
        ballots = {rank: Ballot(rank != spoiler, 7 + rank, 20 - rank, rank * rank) for rank in range(10)}
        assert set(ranks.cast(ballots).values()) == {Ballot(False, 7, 11, 0)}
    assert set(ranks.cast({rank: Ballot(True, 4, 1, 2) for rank in range(10)}).values()) == {Ballot(True, 4, 1, 2)}


@pytest.mark.parametrize("missing", [0, 1, 8, 9])
def test_where_a_rank_does_not_vote_no_rank_has_a_result_and_all_are_free_once_cut(missing: int) -> None:
    ranks = Ranks(10)
    alive = [rank for rank in range(10) if rank != missing]
    timer = threading.Timer(0.5, lambda: [ranks.connections[rank].cut() for rank in alive])
    timer.start()
    found = ranks.cast({rank: Ballot(True, 1) for rank in alive})
    timer.join()
    assert all(isinstance(result, RuntimeError) for result in found.values())
    assert len(found) == 9


def test_timeouts_are_the_group_s() -> None:
    store, made = dist.HashStore(), []

    def make(rank: int) -> None:
        made.append((rank, Vote(store, rank, 2, 1.0, Connections())))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(RuntimeError):
        dict(made)[0].cast(Ballot(True, 1))
