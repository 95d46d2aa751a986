"""The training script's model: the same training under every config, up to the order of sums."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched_ranks import ROOT, launch, torchrun

SIZES = {1: ["PP1TP1DP1"], 2: ["PP2TP1DP1"], 4: ["PP2TP2DP1", "PP1TP2DP2", "PP1TP1DP4"]}
CONFIGS = [config for configs in SIZES.values() for config in configs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Config -> its losses and whole parameters, the stages put together."""
    folder = tmp_path_factory.mktemp("gpt")
    for num_ranks, configs in SIZES.items():
        launch(num_ranks, Path(__file__).with_name("gpt_ranks.py"), str(folder), *configs)
    merged: dict[str, dict[str, Any]] = {}
    for config in CONFIGS:
        stages = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{config}-stage*.json"))]
        merged[config] = {
            "losses": stages[-1]["losses"],
            "initial": {name: values for stage in stages for name, values in stage["initial"].items()},
            "final": {name: values for stage in stages for name, values in stage["final"].items()},
        }
    return merged


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_starts_with_the_same_weights_bit_for_bit(runs: dict[str, Any], config: str) -> None:
    assert runs[config]["initial"] == runs["PP1TP1DP1"]["initial"]


@pytest.mark.parametrize("config", CONFIGS)
def test_losses_differ_by_the_order_of_sums_alone(runs: dict[str, Any], config: str) -> None:
    # Single precision sums in another order differ by about 1e-7 of a loss near 5; five AdamW steps amplify that.
    assert runs[config]["losses"] == pytest.approx(runs["PP1TP1DP1"]["losses"], abs=1e-5)
    assert runs[config]["losses"][-1] < runs[config]["losses"][0] - 0.1


def test_pipeline_stages_compute_bit_for_bit_what_one_rank_does(runs: dict[str, Any]) -> None:
    # Nothing is summed over pp but the squares of the gradient norm: one scalar, rounded otherwise.
    assert runs["PP2TP1DP1"]["losses"] == pytest.approx(runs["PP1TP1DP1"]["losses"], abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3", "--hidden", "33"], "use a multiple of 6"),
        (["--layers", "1", "--parallel", "PP2TP1DP1"], "1 layers cannot fill pp=2 stages"),
        (["--heads", "1", "--parallel", "PP1TP2DP1"], "1 heads cannot be divided over tp=2"),
        (["--global-batch", "4", "--parallel", "PP2TP1DP1"], "1 microbatches per dp rank cannot keep pp=2 stages busy"),
        (["--global-batch", "6", "--parallel", "PP1TP1DP2"], "cannot be divided over dp=2 into microbatches of 4"),
        (["--data", "/does/not/exist"], "--data /does/not/exist does not exist"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from gpt.data import ByteSamples
    from gpt.options import GptOptions, OptionsError

    from etc_agent.parallel.config import ParallelConfig

    given = {key[2:].replace("-", "_"): value for key, value in zip(arguments[::2], arguments[1::2], strict=True)}
    config = ParallelConfig.parse(given.pop("parallel", "PP1TP1DP1"))
    path = Path(given.pop("data")) if "data" in given else None

    def prepare() -> None:
        options = GptOptions(**{key: int(value) for key, value in given.items()})
        options.check(config)
        ByteSamples(path, options.sequence, options.seed)

    with pytest.raises(OptionsError) as caught:
        prepare()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_samples_come_in_an_order_of_seed_and_number_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from gpt.data import ByteSamples

    (tmp_path / "text").write_bytes(bytes(range(256)) * 4)
    samples, again, other = (ByteSamples(tmp_path / "text", 16, seed) for seed in (1, 1, 2))
    per_epoch = 63
    first = [tuple(samples[i].tolist()) for i in range(2 * per_epoch)]
    assert first == [tuple(again[i].tolist()) for i in range(2 * per_epoch)]
    assert first[:per_epoch] != [tuple(other[i].tolist()) for i in range(per_epoch)]
    assert sorted(first[:per_epoch]) == sorted(first[per_epoch:])
    assert first[:per_epoch] != first[per_epoch:]


def test_the_script_trains_alike_in_a_session_and_plainly_and_after_a_checkpointed_restart(tmp_path: Path) -> None:
    sizes = ["--layers=3", "--hidden=32", "--sequence=32", "--global-batch=8", "--microbatch=2", "--steps=4"]
    sizes.append(f"--data={ROOT / 'scripts'}")

    def losses(name: str, start: Callable[..., str], script: str, *arguments: str) -> list[float]:
        log = tmp_path / f"{name}.jsonl"
        start(2, ROOT / "scripts" / script, *sizes, f"--step-log={log}", *arguments)
        return [json.loads(line)["loss"] for line in log.read_text().splitlines()]

    session = losses("session", torchrun, "train_gpt.py", "--parallel=PP2TP1DP1", f"--sample-log={tmp_path}/ids")
    checkpoint = f"--save-dir={tmp_path}/checkpoint"
    begun = losses("begun", launch, "train_gpt_dcp.py", "--parallel=PP2TP1DP1", "--stop-at=2", checkpoint)
    assert begun == session[:2]
    resumed = losses("resumed", launch, "train_gpt_dcp.py", "--parallel=PP1TP2DP1", "--resume", checkpoint)
    assert resumed == pytest.approx(session[2:], abs=1e-5)
    lines = [json.loads(line) for file in os.listdir(tmp_path / "ids") for line in (tmp_path / "ids" / file).open()]
    assert sorted(i for line in lines if line["pp"] == 0 for i in line["ids"]) == list(range(4 * 8))


def test_other_threads_never_see_the_optimizer_over_anything_but_the_models_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import torch
    from gpt.optimizer import LocalAdamW
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.nn.Parameter(torch.randn(4, 3))
        param = torch.nn.Parameter(distribute_tensor(plain.detach(), mesh, [Shard(0)], src_data_rank=None))
        optimizer = LocalAdamW([param])
        reference = torch.optim.AdamW([plain])
        before = optimizer.param_groups, optimizer.state
        zeros = {key: torch.zeros(2, 3) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {
            "step": torch.tensor(0.0),
            **{key: type(param).from_local(value, mesh, [Shard(0)]) for key, value in zeros.items()},
        }
        for _ in range(3):
            param.grad, plain.grad = param.detach().clone(), plain.detach().clone()
            optimizer.step()
            reference.step()
        assert (optimizer.param_groups, optimizer.state) == before
        assert optimizer.param_groups is before[0]
        assert optimizer.state is before[1]
        assert torch.equal(param.to_local(), plain[:2])
        assert torch.equal(zeros["exp_avg"], reference.state[plain]["exp_avg"][:2])
    finally:
        destroy_process_group()
