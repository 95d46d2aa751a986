"""First values from whole tensors that lie elsewhere: names are compared, each rank reads its part."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import etc_agent as etc
from etc_agent.errors import EtcError
from etc_agent.integrations import sources
from etc_agent.integrations.constructed import parameters_on_meta
from etc_agent.integrations.native import TrainState, create_optimizer_state, shards_of, start_values, whole_model
from etc_agent.integrations.weights import fill_lost, open_weights
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.world.build import build_fake
from etc_agent.worker.world.swap import entered, install

CPU = torch.device("cpu")


class Net(nn.Module):
    """With tied weights, a buffer that a checkpoint has, and one that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.up = nn.Linear(4, 8, dtype=torch.bfloat16)
        self.down = nn.Linear(8, 4, bias=False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("frequencies", 1.0 / torch.arange(1.0, 5.0), persistent=False)


def on_meta(init: Any, model: Callable[[], nn.Module] = Net) -> TrainState:
    with torch.device("meta"):
        module = model()
        state = TrainState(module, torch.optim.AdamW(module.parameters()), init=init)
    create_optimizer_state(state)
    return state


def alone(value: Any) -> list[Any]:
    return [json.loads(json.dumps(value))]


def start(state: TrainState, constructed: nn.Module | None = None) -> TrainState:
    """As a session starts with it, on the only rank."""
    open_weights(state, alone)
    with parameters_on_meta():
        buffers = whole_model(TrainState(Net(), None)).tensors
    if constructed is None:
        state.init = (lambda made: fill_lost(made, buffers), *state.init)
    start_values(state, CPU, None if constructed is None else whole_model(TrainState(constructed, None)))
    return state


def source() -> nn.Module:
    torch.manual_seed(5)
    model = Net()
    model.count.fill_(9)
    return model


def without_ties(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Hugging Face writes it: of tied weights one."""
    return {name: tensor.contiguous() for name, tensor in state_dict.items() if name != "head.weight"}


def a_state_dict(folder: Path) -> Any:
    return source().state_dict()


def a_saved_file(folder: Path) -> Any:
    torch.save(source().state_dict(), folder / "model.pt")
    return folder / "model.pt"


def a_safetensors_file(folder: Path) -> Any:
    save_file(without_ties(source().state_dict()), folder / "model.safetensors")
    return str(folder / "model.safetensors")


def a_folder_with_an_index(folder: Path) -> Any:
    tensors = without_ties(source().state_dict())
    halves = dict(list(tensors.items())[:2]), dict(list(tensors.items())[2:])
    places = {}
    for number, half in enumerate(halves, 1):
        save_file(half, folder / f"model-0000{number}-of-00002.safetensors")
        places |= dict.fromkeys(half, f"model-0000{number}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def a_checkpoint(folder: Path) -> Any:
    dcp.save(source().state_dict(), checkpoint_id=folder, no_dist=True)
    return folder


def a_nested_checkpoint(folder: Path) -> Any:
    dcp.save({"app": {"model": source().state_dict()}, "note": "by hand"}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", [
    a_state_dict, a_saved_file, a_safetensors_file, a_folder_with_an_index, a_checkpoint, a_nested_checkpoint,
])
def test_weights_of_every_kind_give_all_values(given: Callable[[Path], Any], tmp_path: Path) -> None:
    state, expected = start(on_meta(given(tmp_path))), source()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state.model.state_dict()[name], tensor), name
    assert state.model.head.weight is state.model.embed.weight
    assert torch.equal(state.model.frequencies, expected.frequencies), "what is not persistent is computed"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", [a_safetensors_file, a_checkpoint])
def test_a_rank_reads_its_own_boxes_alone(
    given: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, int] = {}
    for kind in (sources.Safetensors, sources.Checkpoint):
        def load(self: Any, parts: Any, really: Any = kind.load) -> None:
            read.update({part.name: part.box.num_elements for part in parts})
            really(self, parts)

        monkeypatch.setattr(kind, "load", load)
    install()
    with contextlib.closing(build_fake(1, ParallelConfig(tp=2), CPU)) as world, entered(world):
        state = on_meta(given(tmp_path))
        parallelize_module(state.model, world.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        state.optimizer = None
        start(state)
        assert isinstance(state.model.up.weight, DTensor)
        expected = source().state_dict()
        for shard, local in shards_of(state).items():
            if shard.tensor.name != "model.frequencies":
                part = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))
                assert torch.equal(local, expected[shard.tensor.name.removeprefix("model.")][part]), shard
    assert read == {"embed.weight": 24, "up.weight": 16, "up.bias": 4, "down.weight": 16, "count": 1}


def refused(init: Any) -> str:
    with pytest.raises(EtcError) as caught:
        start(on_meta(init))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_names_that_do_not_fit_are_refused_with_the_remedy(tmp_path: Path) -> None:
    weights = source().state_dict()
    missing = dict(weights)
    del missing["count"], missing["up.bias"]
    text = refused(missing)
    assert text.startswith(
        "the state dict has no count, up.bias; its names are like down.weight, embed.weight, head.weight, up.weight: "
        "give TrainState(init=etc_agent.Weights(..., names="
    )
    assert 'init=("module", ...)' in text
    assert refused(weights | {"old": torch.ones(1)}).startswith(
        "the state dict has old, which the model has not; leave them out with TrainState(init=etc_agent.Weights(..., "
        "ignore=['old']))"
    )
    assert refused(weights | {"up.bias": torch.ones(3)}).startswith(
        "up.bias is (3,) in the state dict, and build() makes model.up.bias (8,)"
    )
    assert "has a str as 'note'; give a full state dict" in refused({**weights, "note": "x"})


def test_a_path_where_nothing_lies_is_refused_with_what_could(tmp_path: Path) -> None:
    assert "there is no such file or folder" in refused("modul")
    assert "which has no *.safetensors and no .metadata" in refused(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    assert "model.safetensors is no readable safetensors file" in refused(tmp_path)
    (tmp_path / "weights.npz").touch()
    assert "give a .safetensors file, a folder of them" in refused(tmp_path / "weights.npz")


def test_names_may_differ_by_a_prefix_or_as_the_script_says() -> None:
    weights = {f"module.{name}": tensor for name, tensor in source().state_dict().items()}
    assert start(on_meta(weights)).model.count == 9
    del weights["module.count"]
    renamed = {"count": "seen", "embed.weight": "tokens"}
    weights = {renamed.get(name, name): tensor for name, tensor in without_ties(source().state_dict()).items()}
    for names in (renamed, lambda name: renamed.get(name, name)):
        given = etc.Weights({**weights, "old.bias": torch.ones(1)}, names=names, ignore=["old.*"])
        state = start(on_meta(given))
        assert (state.model.count, state.model.embed.weight[0, 0]) == (9, source().embed.weight[0, 0])


def test_what_a_file_lacks_may_come_from_the_constructors_and_a_function_may_follow() -> None:
    weights = source().state_dict()
    del weights["up.weight"]
    constructed = Net()
    state = on_meta(("module", weights, lambda made: made.model.count.fill_(4) and 7))
    open_weights(state, alone)
    assert start_values(state, CPU, whole_model(TrainState(constructed, None))) == 7
    assert torch.equal(state.model.up.weight, constructed.up.weight)
    assert torch.equal(state.model.down.weight, source().down.weight)
    assert state.model.count == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_hand", [False, True], ids=["get_state_dict", "as etc-run names it"])
def test_optimizer_state_of_a_checkpoint_is_loaded_by_name(by_hand: bool, tmp_path: Path) -> None:
    model = source()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    if by_hand:
        names = {id(param): name for name, param in model.named_parameters()}
        flat = {
            f"optimizer.{names[id(param)]}.{key}": value
            for param, entries in optimizer.state.items() for key, value in entries.items()
        }
        dcp.save({f"model.{name}": each for name, each in model.state_dict().items()} | flat, checkpoint_id=tmp_path)
    else:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=tmp_path)
    state = start(on_meta(tmp_path))
    names = dict(state.model.named_parameters())
    for name, param in model.named_parameters():
        found = state.optimizer.state[names[name]]
        assert torch.equal(found["exp_avg"], optimizer.state[param]["exp_avg"]), name
        assert found["step"] == 1
    assert torch.equal(state.model.down.weight, model.down.weight)


def test_a_problem_of_one_rank_is_every_ranks_error() -> None:
    state = on_meta(source().state_dict())
    with pytest.raises(EtcError, match=r"^rank 1 has no such file"):
        open_weights(state, lambda value: [value, {"error": "rank 1 has no such file"}])
    state = on_meta({**source().state_dict(), "layers.7.bias": torch.ones(1)})
    open_weights(state, lambda value: [value, {"error": "", "known": ["layers.7.bias"]}])
