"""Worlds, random streams and votes without an agent; and the oracle itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mini_agent import run_script

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import assert_same_bits, gathered

from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.change.state.rng import carried_stream, derived_seed
from etc_agent.worker.change.state.shard_dumps import dump_shards
from etc_agent.worker.data.division import GlobalBatch

CPU = torch.device("cpu")

TWO_WORLDS = """
import gc, os, threading
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.world import build as worlds, swap

swap.install()
cpu = torch.device("cpu")
def of_script():
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))

first = worlds.build(dist.HashStore(), 0, ParallelConfig(), 1, cpu, 10.0)
swap.activate(first)
before = of_script()
assert before == of_script()
made = []

def beside():
    made.append(worlds.build(dist.HashStore(), 0, ParallelConfig(), 2, cpu, 10.0))
    with swap.entered(made[0]):
        assert of_script() != before and of_script()["dp_shard"] != before["dp_shard"]
        assert dist.group.WORLD is made[0].contents.default_pg
    assert dist.group.WORLD is first.contents.default_pg

thread = threading.Thread(target=beside)
thread.start()
thread.join()
second = made.pop()
assert first.mesh != second.mesh and first.mesh["tp"] != second.mesh["tp"]

def doubled(of):
    local = distribute_tensor(torch.ones(4, 4), of.mesh["tp"], [Shard(0)])
    return (local + local).device_mesh._get_root_mesh() is of.mesh

def count():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

assert doubled(first)
swap.activate(second)
assert doubled(second)
first.close()
first.close()
del first
ones = torch.ones(1)
dist.all_reduce(ones)
before = count()
for number in range(3, 9):
    following = worlds.build(dist.HashStore(), 0, ParallelConfig(), number, cpu, 10.0)
    swap.activate(following)
    second.close()
    second = following
    assert doubled(second)
assert count() == before, (before, count())

for rank in range(8):
    fake = worlds.build_fake(rank, ParallelConfig(2, 2, 2), cpu)
    with swap.entered(fake):
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 8)
        assert tuple(fake.mesh.get_coordinate()) == (rank // 4, rank // 2 % 2, 0, rank % 2)
    fake.close()
config = ParallelConfig(pp=2, tp=2, dp=2, cp=2, ep=2)
for rank in range(16):
    fake = worlds.build_fake(rank, config, cpu)
    at = config.coordinate(rank)
    with swap.entered(fake):
        assert tuple(fake.mesh.get_coordinate()) == (at.pp, at.dp, at.cp, at.tp)
        of_experts = (at.pp, config.replica(rank) // 2, config.expert_part(rank), at.tp)
        assert tuple(fake.expert_mesh.get_coordinate()) == of_experts
        dense = fake.mesh["dp", "cp"]._flatten("both")
        assert dist.get_process_group_ranks(dense.get_group())[:2] == [rank // 8 * 8 + at.tp, rank // 8 * 8 + at.tp + 2]
    fake.close()
assert dist.get_world_size() == 1
print("fine")
"""


def test_a_world_is_built_beside_the_active_one_takes_its_place_and_the_old_one_goes_without_a_trace(
    tmp_path: Path,
) -> None:
    exit_code, written = run_script(TWO_WORLDS, tmp_path / "log", {})
    assert (exit_code, written.splitlines()[-1:]) == (0, ["fine"]), written


def test_a_coordinate_in_both_configs_carries_its_stream_and_others_do_not() -> None:
    small, large = ParallelConfig(1, 2, 1), ParallelConfig(2, 2, 1)
    carried = [carried_stream(rank, large, small, CPU) for rank in range(4)]
    assert [shard is not None for shard in carried] == [True, True, False, False]
    assert carried[:2] == [carried_stream(rank, small, large, CPU) for rank in range(2)]


def test_new_streams_differ_between_ranks_generations_and_seeds() -> None:
    seeds = {derived_seed(s, g, r) for s in range(3) for g in range(3) for r in range(8)}
    assert len(seeds) == 3 * 3 * 8
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_global_batch_that_dp_does_not_divide_is_refused_with_what_would_do() -> None:
    GlobalBatch(12).check(ParallelConfig(dp=6))
    with pytest.raises(ValueError, match="12 cannot be divided over dp=5; choose dp from 1, 2, 3, 4, 6, 12"):
        GlobalBatch(12).check(ParallelConfig(dp=5))


def written_by_hand(directory: Path, side: str, rank: int, offset: int, payload: list[int]) -> None:
    entry = {"name": "w", "shape": [4], "dtype": "uint8", "itemsize": 1, "offset": [offset], "extent": [len(payload)]}
    index = np.frombuffer(json.dumps([entry]).encode(), dtype=np.uint8)
    np.savez(directory / f"gen2-{side}-rank{rank}.npz", index=index, b0=np.array(payload, dtype=np.uint8))


def test_the_oracle_sees_a_hole_a_differing_replica_and_a_flipped_bit(tmp_path: Path) -> None:
    written_by_hand(tmp_path, "old", 0, 0, [1, 2, 3])
    with pytest.raises(AssertionError, match="lacks parts of"):
        gathered(tmp_path, 2, "old", 1)
    written_by_hand(tmp_path, "old", 1, 2, [9, 4])
    with pytest.raises(AssertionError, match="replicas of w differ"):
        gathered(tmp_path, 2, "old", 2)
    written_by_hand(tmp_path, "old", 1, 2, [3, 4])
    written_by_hand(tmp_path, "new", 0, 0, [1, 2, 3, 5])
    old, new = gathered(tmp_path, 2, "old", 2), gathered(tmp_path, 2, "new", 1)
    assert_same_bits(old, old)
    with pytest.raises(AssertionError, match="1 of 4 bytes differ"):
        assert_same_bits(old, new)


def test_shards_of_every_kind_are_written_with_their_bits(tmp_path: Path) -> None:
    from etc_agent.state.boxes import Box, whole
    from etc_agent.state.layout import LogicalTensor, Shard

    matrix = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    shards = {
        Shard(LogicalTensor("m", (3, 8), "bfloat16", 2), Box((0, 4), (3, 4))): matrix.t().contiguous().t(),
        Shard(LogicalTensor("step", (), "float32", 4), whole(())): torch.tensor(7.0),
        Shard(LogicalTensor("none", (0, 8), "int64", 8), whole((0, 8))): torch.zeros(0, 8, dtype=torch.int64),
    }
    dump_shards(str(tmp_path), 3, "new", 0, shards)
    with np.load(tmp_path / "gen3-new-rank0.npz") as file:
        assert [entry["name"] for entry in json.loads(file["index"].tobytes())] == ["m", "step", "none"]
        assert file["b0"].tobytes() == matrix.view(torch.uint8).numpy().tobytes()
        assert file["b1"].view(np.float32) == 7.0
        assert file["b2"].size == 0


SCALED = """
import torch
import etc_agent as etc

def initialise(state):
    state.model.weight.zero_()

def build(parallel):
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return etc.TrainState(model, optimizer, scheduler, scaler, init=initialise)

with etc.session(build) as session:
    for step in session.steps(4):
        with step:
            state = session.state
            factor = float("inf") if step.index == 1 else 1.0
            state.scaler.scale(state.model(torch.ones(1, 2) * factor).sum()).backward()
            if step.index == 2:
                state.scaler.unscale_(state.optimizer)
            applied = step.commit(ok=step.index != 3)
        weight = state.model.weight[0, 0].item()
        print(step.index, applied, state.scaler.get_scale(), weight, state.scheduler.last_epoch)
"""


def test_a_scaled_step_with_non_finite_gradients_is_dropped_and_the_scale_backs_off(tmp_path: Path) -> None:
    exit_code, written = run_script(SCALED, tmp_path / "log", {})
    assert exit_code == 0, written
    assert written.splitlines() == [
        "0 True 8.0 -1.0 1",
        "1 False 4.0 -1.0 1",
        "2 True 4.0 -1.75 2",
        "3 False 2.0 -1.75 2",
    ]


def test_the_names_of_the_package_are_loaded_when_used(tmp_path: Path) -> None:
    code = (

        "import etc_agent as etc\n"
        "assert callable(etc.session) and etc.TrainState and etc.ParallelContext\n"
        "try: etc.nonsense\n"
        "except AttributeError as error: print(error)\n"
    )
    exit_code, written = run_script(code, tmp_path / "log", {})
    assert (exit_code, written.strip()) == (0, "module 'etc_agent' has no attribute 'nonsense'")
