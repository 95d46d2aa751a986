"""Which mode a migration runs in."""

from __future__ import annotations

import torch

from etc_agent.migration.modes import ModeRequest, bid_of, choose_mode, free_bytes
from etc_agent.state.layout import Manifest
from tests.migration.states import grid, logical

TENSOR = logical("w", (64, 64), torch.float32)  # 16 KiB
HALVES = grid(TENSOR, (2, 1))
WHOLE = grid(TENSOR, (1, 1))
OLD: list[Manifest] = [(WHOLE[0],), ()]
NEW: list[Manifest] = [(HALVES[0],), (HALVES[1],)]


def chosen(*wishes: ModeRequest) -> tuple[str, int | None, str]:
    each = zip(wishes, OLD, NEW, strict=True)
    choice = choose_mode([bid_of(worker, *bid) for worker, bid in enumerate(each)])
    return choice.mode, choice.budget_bytes, choice.why


def test_auto_keeps_where_old_and_new_state_fit_on_every_worker() -> None:
    assert chosen(ModeRequest("auto", 0, 8 << 10), ModeRequest("auto", 0, 8 << 10))[0] == "keep"


def test_auto_releases_where_they_do_not_fit_on_one_and_says_on_which() -> None:
    mode, budget, why = chosen(ModeRequest("auto", 0, (8 << 10) - 1), ModeRequest("auto", 0, 1 << 30))
    assert (mode, budget) == ("release", None)
    assert why == "old and new state of worker 0 take 24,576 bytes together, there is room for 24,575"


def test_a_stated_budget_counts_instead_of_free_memory_and_binds_all() -> None:
    mode, budget, why = chosen(ModeRequest("auto", 20 << 10, 1 << 40), ModeRequest("auto", 30 << 10, 1 << 40))
    assert (mode, budget) == ("release", 20 << 10)
    assert "there is room for 20,480" in why


def test_what_is_asked_for_is_done_and_one_that_releases_decides_for_all() -> None:
    assert chosen(ModeRequest("keep", 0, 0), ModeRequest("keep", 0, 0))[0] == "keep"
    assert chosen(ModeRequest("keep", 0, 1 << 40), ModeRequest("release", 0, 1 << 40))[2] == "worker 1 asks for it"


def test_a_shard_that_stays_counts_once() -> None:
    assert bid_of(0, ModeRequest("auto", 0, 0), (WHOLE[0],), (WHOLE[0],)).weight == 0


def test_free_host_memory_is_what_the_kernel_can_give() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < 1 << 60
