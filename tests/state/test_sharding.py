"""Layouts from model descriptions, against slicing of whole arrays by rules written down independently here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_agent.parallel.config import ParallelConfig
from etc_agent.state.boxes import Box, whole
from etc_agent.state.check import LayoutError, check_layout
from etc_agent.state.layout import LogicalTensor, Shard
from etc_agent.state.model import ModelDescription, StateKind
from etc_agent.state.sharding import Sharding, even_stages, refusal

parse = ParallelConfig.parse
KINDS = (StateKind("model", "bfloat16", 2, sharded=False), StateKind("optimizer.exp_avg", "float32", 4))
TINY = ModelDescription(
    "tiny", num_layers=4, hidden=8, num_heads=4, num_kv_heads=2, vocab=13, ffn_hidden=6, vocab_multiple=2, gated=True,
    kinds=KINDS,
)
GPT = replace(TINY, name="gpt", gated=False, bias=True, norm="layer", positions=5, tied=True, num_kv_heads=0)
MOE = replace(TINY, name="moe", num_experts=4)


def array_of(tensor: LogicalTensor) -> np.ndarray:
    return np.arange(np.prod(tensor.shape, dtype=int)).reshape(tensor.shape)


def local_oracle(model: ModelDescription, name: str, full: np.ndarray, tp: int, part: int) -> np.ndarray:
    """What tp rank `part` holds of the parameter `name`, flattened: what a training framework would slice."""
    heads, kv, width = model.num_heads, model.num_kv_heads or model.num_heads, model.hidden // model.num_heads
    if "qkv" in name:
        q, k, v = np.split(full, [heads * width, (heads + kv) * width])
        mine = range(part * heads // tp, (part + 1) * heads // tp)
        group = heads // kv
        kv_mine = sorted({head // group for head in mine})
        pick = lambda rows, of: [rows[h * width:(h + 1) * width] for h in of]  # noqa: E731
        return np.concatenate([*pick(q, mine), *pick(k, kv_mine), *pick(v, kv_mine)]).ravel()
    if name.endswith(("embedding.word", "head")):
        rows = -(-model.vocab // (model.vocab_multiple * tp)) * model.vocab_multiple
        padded = np.concatenate([full, np.full((rows * tp - len(full), full.shape[1]), -1)])
        mine = padded[rows * part:rows * (part + 1)]
        return mine[mine[:, 0] >= 0].ravel()
    if name.endswith((".up", ".up_bias")):
        step = -(-model.ffn_hidden // tp)
        blocks = np.split(full, 2) if model.gated else [full]
        return np.concatenate([block[step * part:step * (part + 1)] for block in blocks]).ravel()
    if name.endswith("attention.out"):
        return full[:, width * heads * part // tp:width * heads * (part + 1) // tp].ravel()
    if name.endswith(".down"):
        step = -(-model.ffn_hidden // tp)
        return full[:, step * part:step * (part + 1)].ravel()
    return full.ravel()


def local(shards, name):
    parts = [
        array_of(s.tensor)[s.box.within(whole(s.tensor.shape))].ravel() for s in shards if s.tensor.name == name
    ]
    return np.concatenate(parts) if parts else np.zeros(0, int)


CONFIGS = ["PP1", "TP2", "TP4", "PP2TP2", "PP4", "PP2DP2", "PP2TP4DP2", "DP4"]


@pytest.mark.parametrize("model", [TINY, GPT], ids=lambda model: model.name)
@pytest.mark.parametrize("text", CONFIGS)
def test_every_rank_holds_what_slicing_the_whole_gives_it(model, text):
    config = parse(text)
    sharding = Sharding(model, config)
    layout = sharding.layout()
    for rank, manifest in enumerate(layout):
        at = config.coordinate(rank)
        names = {shard.tensor.name for shard in manifest}
        for unit in sharding.units():
            tensor = sharding.logical(unit, model.kinds[0])
            if at.pp in unit.stages:
                expected = local_oracle(model, unit.name, array_of(tensor), config.tp, at.tp)
                assert (local(manifest, tensor.name) == expected).all(), (rank, unit.name)
            else:
                assert tensor.name not in names
    check_layout(layout, [sharding.logical(u, k) for u in sharding.units() for k in model.kinds])


@pytest.mark.parametrize("model", [TINY, GPT, MOE], ids=lambda model: model.name)
@pytest.mark.parametrize("text", ["DP2", "DP4", "PP2TP2DP2", "TP2DP3"])
def test_zero1_gives_each_replica_its_range_of_the_flat_buffer(model, text):
    config = parse(text)
    plain, flat = Sharding(model, config), Sharding(replace(model, zero1=True), config)
    for stage in range(config.pp):
        for part in range(config.tp):
            ranks = [
                rank for rank in range(config.num_ranks)
                if (config.coordinate(rank).pp, config.coordinate(rank).tp) == (stage, part)
            ]
            full = [shard for shard in plain.manifest(ranks[0]) if shard.tensor.name.startswith("optimizer")]
            names = list(dict.fromkeys(shard.tensor.name for shard in full))
            dense = [name for name in names if "expert" not in name]
            for group in (dense, [name for name in names if "expert" in name]):
                whole_buffer = [(name, value) for name in group for value in local(full, name)]
                parts = [
                    [(name, value) for name in group for value in local(flat.manifest(rank), name)] for rank in ranks
                ]
                assert [entry for part_ in parts for entry in part_] == whole_buffer
                sizes = [len(part_) for part_ in parts]
                assert all(size in (sizes[0], 0) or index == sum(s == sizes[0] for s in sizes)
                           for index, size in enumerate(sizes))


def test_experts_live_on_their_part_of_the_replicas():
    sharding = Sharding(MOE, parse("DP4EP2"))
    held = [
        sorted({int(s.tensor.name.split(".experts.")[1].split(".")[0]) for s in m if ".experts." in s.tensor.name})
        for m in sharding.layout()
    ]
    assert held == [[0, 1], [2, 3], [0, 1], [2, 3]]
    check_layout(sharding.layout())


def test_owners_say_the_same_as_the_manifests():
    for model, text in ((TINY, "PP2TP4DP2"), (GPT, "PP2TP2DP2"), (MOE, "TP2DP4EP4"), (TINY, "TP2DP2CP2")):
        sharding = Sharding(model, parse(text))
        layout = sharding.layout()
        for unit in sharding.units():
            tensor = sharding.logical(unit, model.kinds[0])
            from_owners = {(box, int(rank)) for box, ranks in sharding.owners(unit) for rank in ranks}
            assert from_owners == {(s.box, rank) for rank, m in enumerate(layout) for s in m if s.tensor == tensor}


@given(
    st.sampled_from([TINY, GPT, MOE]), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans(),
    st.integers(1, 2), st.integers(5, 40),
)
@settings(max_examples=30, deadline=None)
def test_any_layout_covers_the_model(model, pp, tp, dp, zero1, interleave, vocab):
    model = replace(model, zero1=zero1, vocab=vocab)
    config = ParallelConfig(pp=pp, tp=tp, dp=dp)
    if refusal(model, config, interleave=interleave):
        return
    sharding = Sharding(model, config, interleave=interleave)
    check_layout(sharding.layout(), [sharding.logical(u, k) for u in sharding.units() for k in model.kinds])


def test_stages_may_be_uneven_interleaved_or_listed():
    assert even_stages(7, 3) == (0, 0, 0, 1, 1, 2, 2)
    assert even_stages(8, 2, interleave=2) == (0, 0, 1, 1, 0, 0, 1, 1)
    sharding = Sharding(TINY, parse("PP2"), stages=[0, 1, 1, 1])
    assert [u.stages for u in sharding.units() if u.name.endswith("attention.out")] == [(0,), (1,), (1,), (1,)]
    with pytest.raises(ValueError, match="stage list"):
        Sharding(TINY, parse("PP2"), stages=[0, 0, 0, 0])


def test_key_value_heads_are_replicated_when_tp_exceeds_them():
    layout = Sharding(TINY, parse("TP4")).layout()
    boxes = [[s.box for s in m if s.tensor.name == "model.layers.0.attention.qkv"] for m in layout]
    assert boxes[0] == [Box((0, 0), (2, 8)), Box((8, 0), (2, 8)), Box((12, 0), (2, 8))]
    assert boxes[0][1:] == boxes[1][1:]
    assert boxes[0][1:] != boxes[2][1:]


def test_shards_may_be_empty():
    layout = Sharding(replace(TINY, num_heads=8, num_kv_heads=8, gated=False), parse("TP4")).layout()
    sizes = [[s.box.shape[0] for s in m if s.tensor.name == "model.layers.0.mlp.up"] for m in layout]
    assert sizes == [[2], [2], [2], []]


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        (TINY, "PP5", "4 layers do not fill 5 stages"),
        (TINY, "TP3", "4 attention heads are not divisible by tp=3"),
        (replace(TINY, num_heads=6, num_kv_heads=3, hidden=12), "TP2", "3 kv heads and tp=2"),
        (TINY, "DP2EP2", "no experts"),
        (replace(MOE, num_experts=3), "DP2EP2", "3 experts are not divisible by ep=2"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_line(model, text, message):
    assert message in (refusal(model, parse(text)) or "")
    with pytest.raises(ValueError, match=message):
        Sharding(model, parse(text))


def test_a_layout_that_loses_or_doubles_something_is_refused_by_name():
    tensor = LogicalTensor("w", (4, 2), "float32", 4)
    with pytest.raises(LayoutError, match=r"w: no rank holds the box at \(3, 0\) of shape \(1, 2\)"):
        check_layout(((Shard(tensor, Box((0, 0), (3, 2))),),))
    with pytest.raises(LayoutError, match="overlap"):
        check_layout(((Shard(tensor, whole((4, 2))), Shard(tensor, Box((0, 0), (1, 1)))),))
    with pytest.raises(LayoutError, match="outside"):
        check_layout(((Shard(tensor, Box((0, 0), (5, 2))),),))
    with pytest.raises(LayoutError, match="w: no rank"):
        check_layout(((),), [tensor])


def test_a_description_with_a_mistake_is_refused_by_field():
    good = {"name": "m", "num_layers": 2, "hidden": 8, "num_heads": 2, "vocab": 10}
    assert ModelDescription.from_json(good).ffn == 32
    for change, message in (
        ({"hiden": 8}, "unknown field 'hiden'"), ({"hidden": "8"}, "hidden: expected int"),
        ({"num_heads": 3}, "not divisible by 3 heads"), ({"norm": "batch"}, "norm is"), ({"vocab": 0}, "vocab must be"),
        ({"ffn_hidden": -8}, "ffn_hidden must be"), ({"num_experts": -1}, "num_experts must be"),
        ({"kinds": []}, "kinds need"), ({"kinds": 7}, "kinds: expected a list"), ({"kinds": [{"name": "a"}]}, "kinds:"),
        ({"kinds": [{"name": "a", "dtype": "float32", "itemsize": 0}]}, "itemsize must be"),
        ({"kinds": [{"name": "a", "dtype": "float32", "itemsize": "4"}]}, "itemsize: expected int"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelDescription.from_json({**good, **change})
    with pytest.raises(ValueError, match="needs vocab"):
        ModelDescription.from_json({key: value for key, value in good.items() if key != "vocab"})
