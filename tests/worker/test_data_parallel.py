"""What is private in DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

from mini_agent import run_script

WITHOUT_BUFFERS = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from etc_agent.torch_private.data_parallel import sync_buffers

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for model in (nn.Linear(2, 2), nn.BatchNorm1d(2)):
    sync_buffers(DistributedDataParallel(model))
dist.destroy_process_group()
print("synchronised")
"""


def test_a_model_without_buffers_has_none_to_synchronise(tmp_path: Path) -> None:
    code, output = run_script(WITHOUT_BUFFERS, tmp_path / "log", {})
    assert (code, "synchronised" in output) == (0, True), output
