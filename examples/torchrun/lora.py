"""LoRA adapters for a frozen Hugging Face Llama in bf16, with DistributedDataParallel or FSDP2.

torchrun --nproc-per-node 2 examples/torchrun/lora.py /tmp/llama
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCABULARY, SEQUENCE = 96, 32


def make_checkpoint(folder: Path) -> None:
    """A small Llama with random weights, as `save_pretrained` writes it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=SEQUENCE, tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Tokens(data.Dataset):
    """Counting upwards in steps of 1 to 5, as tokens."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        first, step = torch.randint(1, 6, (2,), generator=torch.Generator().manual_seed(index))
        return (first * 7 + torch.arange(SEQUENCE) * step) % VOCABULARY


def make_model(folder: Path, dtype: str, adapter_dtype: torch.dtype) -> PeftModel:
    """The frozen model in `dtype`, with adapters that are trained in `adapter_dtype`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(adapter_dtype)
    return model


def shard(model: PeftModel, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 of each layer, the frozen weights as well as the adapters."""
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap(model: nn.Module, fsdp: bool) -> nn.Module:
    return model if fsdp else DistributedDataParallel(model)


def adapters(model: nn.Module, fsdp: bool) -> dict[str, torch.Tensor]:
    """The adapters' weights, whole. Called on every rank."""
    if not fsdp:
        return get_peft_model_state_dict(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    return get_model_state_dict(model, options=options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="a folder that save_pretrained has written")
    parser.add_argument("--make", action="store_true", help="write a small random model there, and nothing else")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 rather than DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=24, help="sequences per step, over all ranks")
    parser.add_argument("--dtype", default="bfloat16", help="of the frozen weights")
    parser.add_argument("--adapter-dtype", default="float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="", help="folder for the adapters")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    args = parser.parse_args()
    if args.make:
        return make_checkpoint(args.model)
    adapter_dtype = getattr(torch, args.adapter_dtype)

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    base = make_model(args.model, args.dtype, adapter_dtype).to(device)
    if args.fsdp:
        shard(base, dist.init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    model = wrap(base, args.fsdp)

    tokens = Tokens()
    sampler = data.DistributedSampler(tokens, shuffle=False, drop_last=True)
    loader = data.DataLoader(tokens, batch_size=args.batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    for step, batch in zip(range(args.steps), loader, strict=False):
        model.train()
        ids = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if args.save and (step + 1) % args.save_every == 0:
            weights = adapters(base, args.fsdp)
            if dist.get_rank() == 0:
                torch.save(weights, f"{args.save}/{step + 1}.pt")
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item() / dist.get_world_size():.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
