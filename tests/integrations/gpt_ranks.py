"""Trains the GPT of scripts/ in one config after another, with the weights of the same seed each time.

    gpt_ranks.py FOLDER CONFIG ...

Writes FOLDER/CONFIG.json: the losses, and norms of the parameters before and after, gathered by DTensor.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt.data import ByteSamples
from gpt.options import GptOptions
from gpt.plain import apply_update, batch_of, build_real
from gpt.training import train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.context import ParallelContext

OPTIONS = GptOptions(
    layers=3, hidden=32, heads=4, sequence=32, steps=5, global_batch=16, microbatch=2, warmup=2, clip=1.0,
    data=Path(__file__).parent,
)


def parameters(model: nn.Module) -> dict[str, list[float]]:
    """Every parameter as a flat list, whole on every rank of its stage."""
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().flatten().tolist()
        for name, param in model.named_parameters()
    }


def main() -> None:
    folder, configs = Path(sys.argv[1]), [ParallelConfig.parse(text) for text in sys.argv[2:]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = ByteSamples(OPTIONS.data, OPTIONS.sequence, OPTIONS.seed)
    for generation, config in enumerate(configs, start=1):
        mesh = init_device_mesh("cpu", (config.pp, config.dp, config.tp), mesh_dim_names=("pp", "dp", "tp"))
        parallel = ParallelContext(
            config, mesh, dist.get_rank(), torch.device("cpu"), generation, OPTIONS.global_batch
        )
        state = build_real(OPTIONS, parallel)
        result: dict[str, Any] = {"initial": parameters(state.model), "losses": []}
        for step in range(OPTIONS.steps):
            result["losses"].append(train(state, parallel, batch_of(data, step, parallel)))
            apply_update(state)
        result["final"] = parameters(state.model)
        place = parallel.coordinate
        if place.dp == place.tp == 0:
            (folder / f"{config}-stage{place.pp}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
