"""What the Megatron adapter says of a model's state, for every kind of optimizer and every config: without peers."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from etc_agent.parallel.config import ParallelConfig
from etc_agent.state.check import check_layout
from etc_agent.state.layout import Layout, Manifest
from etc_agent.worker.data.division import GlobalBatch
from etc_agent.worker.model import build_state
from etc_agent.worker.world.build import build_fake
from etc_agent.worker.world.swap import install

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.stacks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layout_of() -> Callable[..., Layout]:
    install()
    sys.path.insert(0, str(EXAMPLES))
    try:
        script: Any = importlib.import_module("megatron_gpt")
    finally:
        sys.path.remove(str(EXAMPLES))
    from etc_agent.adapters.megatron import Megatron

    def layout(config: str, *, distributed: bool, bf16: bool) -> Layout:
        args = argparse.Namespace(
            layers=4, dropout=0.0, bf16=bf16, untied=False, lr=1e-3, batch=48, steps=100, seed=1,
            distributed_optimizer=distributed,
        )
        adapter, parsed = Megatron(lambda parallel: script.build(args)), ParallelConfig.parse(config)
        manifests = []
        for rank in range(parsed.num_ranks):
            with closing(build_fake(rank, parsed, CPU)) as world:
                held = adapter.shards(build_state(adapter, world, CPU, 1, GlobalBatch(48)))
                assert {tensor.device.type for tensor in held.values() if tensor.dim()} == {"meta"}
                manifests.append(tuple(held))
        return tuple(manifests)

    return layout


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_every_config_holds_the_same_tensors_whole(
    layout_of: Callable[..., Layout], distributed: bool, bf16: bool
) -> None:
    layouts = {each: layout_of(each, distributed=distributed, bf16=bf16) for each in ("DP1", "DP3", "PP2TP2DP2")}
    for layout in layouts.values():
        check_layout(layout)
    tensors = {each: {shard.tensor for manifest in layout for shard in manifest} for each, layout in layouts.items()}
    assert tensors["DP1"] == tensors["DP3"] == tensors["PP2TP2DP2"]
    names = {tensor.name for tensor in tensors["DP1"]}
    params = {name.removeprefix("model.") for name in names if name.startswith("model.")}
    kinds = ["exp_avg", "exp_avg_sq", "step", *(["main"] if bf16 else [])]
    assert names == {f"model.{name}" for name in params} | {
        f"optimizer.{name}.{kind}" for name in params for kind in kinds
    }


def test_a_fused_projection_is_two_boxes_and_a_range_of_the_distributed_optimizer_some(
    layout_of: Callable[..., Layout],
) -> None:
    plain = layout_of("TP2", distributed=False, bf16=False)
    fused = [shard for shard in plain[1] if shard.tensor.name == "model.decoder.layers.mlp.linear_fc1.weight.0"]
    assert [shard.box.offset for shard in fused] == [(48, 0), (144, 0)]
    ranges = layout_of("DP2", distributed=True, bf16=True)
    held = [bytes_of_main(manifest) for manifest in ranges]
    whole = bytes_of_main(layout_of("DP1", distributed=True, bf16=True)[0])
    assert sum(held) == whole
    assert max(held) < whole


def bytes_of_main(manifest: Manifest) -> int:
    return sum(shard.num_bytes for shard in manifest if shard.tensor.name.endswith(".main"))
