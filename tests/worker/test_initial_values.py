"""The values that a session starts with."""

from __future__ import annotations

from pathlib import Path

import module_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from mini_agent import run_script
from safetensors.torch import save_file

from tests.integrations.launched_ranks import launch

SCRIPT = Path(__file__).with_name("module_ranks.py")

NET = """
import torch
from torch import nn
import etc_agent as etc

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

calls = []

def build(parallel):
    calls.append(parallel)
    if REFUSES and len(calls) > 1:
        raise ValueError("needs two ranks")
    model = Net()
    return etc.TrainState(model, torch.optim.AdamW(model.parameters()), init=INIT)
"""


@pytest.mark.parametrize("config", ["PP3", "TP2DP2"])
def test_every_rank_starts_with_its_part_of_what_the_constructors_compute(config: str) -> None:
    num_ranks = {"PP3": 3, "TP2DP2": 4}[config]
    assert "shards agree" in launch(num_ranks, SCRIPT, config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["safetensors", "checkpoint"])
def test_every_rank_starts_with_its_part_of_weights_on_disk(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(module_ranks.SEED)
    weights = module_ranks.Stage(range(module_ranks.LAYERS)).state_dict()
    if kind == "safetensors":
        save_file(weights, tmp_path / "model.safetensors")
    else:
        dcp.save({"model": weights}, checkpoint_id=tmp_path, no_dist=True)
    assert "shards agree" in launch(4, SCRIPT, "TP2PP2", str(tmp_path))


@pytest.mark.parametrize(
    ("init", "refuses", "message"),
    [
        (
            "lambda state: state.model.linear.reset_parameters()", False,
            "EtcError: model.norm.weight, model.norm.bias have no value at the job's start: "
            "TrainState.init did not write all of it",
        ),
        ("None", False, "have no value at the job's start: TrainState was given no init"),
        (
            '"module"', True,
            'EtcError: init="module" builds the model for one rank alone, which it refuses: needs two ranks; give',
        ),
    ],
    ids=["forgotten", "none", "refused"],
)
def test_a_session_without_values_does_not_start(init: str, refuses: bool, message: str, tmp_path: Path) -> None:
    code = f"{NET}\nINIT, REFUSES = {init}, {refuses}\nwith etc.session(build): pass"
    exit_code, written = run_script(code, tmp_path / "script.log", {})
    assert exit_code == 1
    assert message in " ".join(written.split())


def test_replicas_start_with_the_same_values_though_init_starts_no_generator() -> None:
    assert "replicas agree" in launch(2, SCRIPT.with_name("unseeded_ranks.py"))
