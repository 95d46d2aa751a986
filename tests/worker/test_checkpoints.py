"""Checkpoints of real ranks: written in one config, loaded in another, bit for bit."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.checkpoints.folder import check, newest_first
from tests.integrations.launched_ranks import launch

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import Logical, assert_same_bits, gathered

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")
CONFIGS = ["PP1TP1DP1", "PP2TP1DP1", "PP1TP2DP1", "PP1TP1DP2", "PP2TP2DP1", "PP2TP1DP2", "PP1TP2DP2", "PP1TP1DP4"]


def train(model: str, config: str, folder: Path, dumps: Path, num_steps: int, every: int = 1000) -> str:
    dumps.mkdir(exist_ok=True)
    ranks = ParallelConfig.parse(config).num_ranks
    return launch(ranks, SCRIPT, model, config, str(folder), str(dumps), str(num_steps), str(every))


def state(dumps: Path, step: int, side: str, config: str) -> Logical:
    return gathered(dumps, step, side, ParallelConfig.parse(config).num_ranks)


def without_streams(logical: Logical) -> Logical:
    return {name: array for name, array in logical.items() if not name.startswith("rng.")}


def check_pair(model: str, before: str, after: str, tmp_path: Path) -> None:
    folder, old, new = tmp_path / "checkpoints", tmp_path / "old", tmp_path / "new"
    train(model, before, folder, old, num_steps=3, every=3)
    said = train(model, after, folder, new, num_steps=3)
    assert "continuing from checkpoint of step 3 (no step lost)" in said
    written, loaded = state(old, 3, "old", before), state(new, 3, "new", after)
    assert any(name.endswith("exp_avg_sq") for name in written)
    assert_same_bits(without_streams(written), without_streams(loaded))
    kept = {name for name in written if name.startswith("rng.")} & set(loaded)
    assert kept
    assert_same_bits({name: written[name] for name in kept}, {name: loaded[name] for name in kept})
    ranks = ParallelConfig.parse(before).num_ranks
    was = [json.loads((old / f"host-3-old-{rank}.json").read_text()) for rank in range(ranks)]
    now = json.loads((new / "host-3-new-0.json").read_text())
    assert now["lr"] == was[0]["lr"]
    assert now["scheduler"] == was[0]["scheduler"]
    assert now["seen"] == sorted({sample for rank in was for sample in rank["seen"]})


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("gpt", "PP2TP1DP2", "PP1TP2DP1"),
        ("tiny", "PP1TP2DP2", "PP2TP1DP1"),
        ("fsdp", "PP1TP1DP3", "PP1TP1DP2"),
    ],
)
def test_what_one_config_wrote_another_loads_bit_for_bit(
    model: str, before: str, after: str, tmp_path: Path
) -> None:
    check_pair(model, before, after, tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_every_pair_of_configs_of_the_demo_model_bit_for_bit(tmp_path: Path) -> None:
    for before, after in product(CONFIGS, CONFIGS):
        place = tmp_path / f"{before}-{after}"
        place.mkdir()
        check_pair("gpt", before, after, place)


def test_a_loss_curve_goes_on_exactly_from_the_checkpoint(tmp_path: Path) -> None:
    folder, first, second, whole = tmp_path / "checkpoints", tmp_path / "a", tmp_path / "b", tmp_path / "c"
    train("gpt", "PP1TP1DP2", folder, first, num_steps=4, every=2)
    train("gpt", "PP1TP1DP2", folder, second, num_steps=8)
    train("gpt", "PP1TP1DP2", tmp_path / "none", whole, num_steps=8)

    def read(dumps: Path) -> list[str]:
        return (dumps / "losses-0").read_text().splitlines()

    assert read(first) + read(second) == read(whole)


def test_pytorch_alone_reads_it(tmp_path: Path) -> None:
    folder, dumps = tmp_path / "checkpoints", tmp_path / "dumps"
    train("tiny", "PP1TP2DP1", folder, dumps, num_steps=3, every=3)
    written = state(dumps, 3, "old", "PP1TP2DP1")
    (path,) = newest_first(folder)
    name = "model.layers.1.up.weight"
    tensor = torch.zeros(12, 8)
    dcp.load({"model": {"layers.1.up.weight": tensor}}, checkpoint_id=path)
    assert tensor.numpy().tobytes() == written[name].tobytes()
    dcp_to_torch_save(path, tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt")
    assert whole["model"]["layers.1.up.weight"].numpy().tobytes() == written[name].tobytes()
    moment = whole["optimizer"]["layers.1.up.weight"]["exp_avg"]
    assert moment.numpy().tobytes() == written["optimizer.layers.1.up.weight.exp_avg"].tobytes()
    assert json.loads(whole["etc_run"]["host"])["step"] == check(path).step == 3
