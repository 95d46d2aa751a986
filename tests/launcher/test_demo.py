"""What the demo concludes from the files that a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo_picture import draw_loss
from run_demo import DemoError, check_samples, median_step_ms, processes_by_generation

from etc_agent.reconfig.known.records import History


def _trained(folder: Path, pid: int, generation: int, step: int, ids: list[int], pp: int = 0, tp: int = 0) -> None:
    line = {"step": step, "generation": generation, "pp": pp, "dp": 0, "tp": tp, "ids": ids}
    with (folder / f"samples-{pid}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_the_pids_of_a_generation_are_those_that_trained_in_it(tmp_path: Path) -> None:
    _trained(tmp_path, 10, 1, 0, [0])
    _trained(tmp_path, 10, 2, 1, [1])
    _trained(tmp_path, 11, 2, 1, [2])
    assert processes_by_generation(tmp_path) == {1: {10}, 2: {10, 11}}


def test_samples_count_once_however_many_ranks_share_them(tmp_path: Path) -> None:
    for step in range(3):
        for pid, pp, tp in ((10, 0, 0), (11, 1, 0), (12, 0, 1)):
            _trained(tmp_path, pid, 1, step, [2 * step, 2 * step + 1], pp, tp)
    assert check_samples(tmp_path) == (4, 2)


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([[0, 1], [1, 2], [3, 4]], id="repeated"),
        pytest.param([[0, 1], [2], [3, 4]], id="too few"),
        pytest.param([[0, 1], [], [2, 3], [4, 5]], id="none in a step"),
    ],
)
def test_a_repeated_or_missing_sample_fails_the_demo(tmp_path: Path, ids: list[list[int]]) -> None:
    for step, of_step in enumerate(ids):
        _trained(tmp_path, 10, 1, step, of_step)
    with pytest.raises(DemoError, match="skipped or repeated"):
        check_samples(tmp_path)


def test_the_first_step_of_a_size_is_no_ordinary_step() -> None:
    lines = [{"generation": 2, "step_s": seconds} for seconds in (9.0, 0.1, 0.3, 0.2)]
    assert median_step_ms([*lines, {"generation": 3, "step_s": 5.0}]) == {2: pytest.approx(200)}


def test_the_picture_is_drawn_with_and_without_known_times(tmp_path: Path) -> None:
    steps = [{"step": step, "loss": 5.0 / (step + 1)} for step in range(10)]
    history = [
        History(1, "PP2TP1DP1", 0, "start", "committed"),
        History(2, "PP2TP2DP1", 1, "asked for 4", "committed", step=4, stop_ms=90.0, phases_ms={"migrate": 12.0}),
        History(3, "PP1TP1DP4", 2, "asked for DP4", "withdrawn", "not ready"),
    ]
    draw_loss(steps, history, {2: 50.0}, tmp_path / "out" / "loss.png")
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
