"""torchrun/llama.py, elastic.

etc-run --standalone --nproc-per-node 4 --parallel PP2TP2DP1 examples/llama.py /tmp/llama
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import data
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import etc_agent as etc

VOCABULARY, SEQUENCE = 96, 32


def make_checkpoint(folder: Path, tied: bool) -> None:
    """A small Llama with random weights, as `save_pretrained` writes it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=SEQUENCE, tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Tokens(data.Dataset):
    """Counting upwards in steps of 1 to 5, as tokens."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, step = torch.randint(1, 6, (2,), generator=torch.Generator().manual_seed(index))
        tokens = (first * 7 + torch.arange(SEQUENCE + 1) * step) % VOCABULARY
        return tokens[:-1], tokens[1:]


class Elsewhere(nn.Identity):
    """In the place of a layer of another stage."""

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        return x


class Stage(nn.Module):
    """A pipeline stage of a causal language model: those of its layers that are the stage's, and at the ends the
    embedding and the head. The layers keep the numbers that they have in the whole model."""

    def __init__(self, llama: nn.Module, stage: int, num_stages: int) -> None:
        super().__init__()
        self.llama = llama
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if num_stages > 1 and llama.config.tie_word_embeddings:
            raise ValueError("the embedding is tied to the head, which is in another stage; choose pp=1")
        layers = llama.model.layers
        for i in range(len(layers)):
            if i * num_stages // len(layers) != stage:
                layers[i] = Elsewhere()
        if not self.is_first:
            llama.model.embed_tokens = Elsewhere()
        if not self.is_last:
            llama.model.norm, llama.lm_head = Elsewhere(), Elsewhere()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids" if self.is_first else "inputs_embeds": x, "use_cache": False}
        if self.is_last:
            return self.llama(**inputs).logits
        return self.llama.model(**inputs).last_hidden_state


STYLES = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
}


def parallelize(llama: nn.Module, mesh: DeviceMesh) -> Stage:
    """This rank's part of the model."""
    pp, tp = mesh["pp"], mesh["tp"]
    if llama.config.num_key_value_heads % tp.size() or pp.size() > llama.config.num_hidden_layers:
        raise ValueError(f"pp={pp.size()} and tp={tp.size()} do not divide this model's layers and heads")
    stage = Stage(llama, pp.get_local_rank(), pp.size())
    if tp.size() > 1:
        plan = {}
        for name, module in llama.named_modules():
            style = llama.tp_plan.get(re.sub(r"\.\d+\.", ".*.", name))
            if style and not isinstance(module, Elsewhere):
                plan[name] = STYLES[style]
        parallelize_module(llama, tp, plan)
        if llama.config.tie_word_embeddings:
            llama.lm_head.weight = llama.model.embed_tokens.weight
    for layer in llama.model.layers:
        if not isinstance(layer, Elsewhere):
            fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(stage, mesh=mesh["dp"])


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Pipeline:
    """The schedule in which a rank's stage runs."""

    def __init__(self, stage: Stage, mesh: DeviceMesh, num_microbatches: int) -> None:
        self.stage, self.mesh, self.device = stage, mesh, next(stage.parameters()).device
        pp = mesh["pp"]
        self.schedule = ScheduleGPipe(
            PipelineStage(stage, pp.get_local_rank(), pp.size(), self.device, group=pp.get_group()),
            num_microbatches,
            loss_fn=cross_entropy,
        )

    def train(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Forward and backward over this rank's samples; returns the mean loss over the global batch."""
        tokens, targets = (each.to(self.device) for each in batch)
        losses: list[torch.Tensor] = []
        is_first, is_last = self.stage.is_first, self.stage.is_last
        self.schedule.step(*[tokens] * is_first, target=targets if is_last else None, losses=losses)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if is_last:
            loss += torch.stack(losses).mean().detach()
        dist.all_reduce(loss)
        return loss / self.mesh["dp"].size() / self.mesh["tp"].size()

    def save(self, path: str) -> None:
        """Write the weights of all stages, by name. Called on every rank."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        parts: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(parts, get_model_state_dict(self.stage, options=options))
        if dist.get_rank() == 0:
            torch.save({name: tensor for part in parts for name, tensor in part.items()}, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="a folder that save_pretrained has written")
    parser.add_argument("--make", choices=("tied", "untied"), help="write a small random model there, and nothing else")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=24, help="sequences per step, over all ranks")
    parser.add_argument("--microbatches", type=int, default=2, help="of a rank's batch, for the pipeline")
    parser.add_argument("--dtype", default="float32", help="of weights and computation")
    parser.add_argument("--save", default="", help="folder for the weights")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    args = parser.parse_args()
    if args.make:
        return make_checkpoint(args.model, args.make == "tied")

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    def build(parallel: etc.ParallelContext) -> etc.TrainState:
        mesh = parallel.mesh
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).to(device).train()
        stage = parallelize(model, mesh)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        activate = lambda state: Pipeline(stage, mesh, args.microbatches)  # noqa: E731
        return etc.TrainState(stage, optimizer, scheduler, init="module", activate=activate)

    tokens = Tokens()
    with etc.session(build, global_batch=args.batch) as session:
        for step in session.steps(args.steps):
            with step:
                pipeline, batch = session.model, session.batch(tokens)
                loss = pipeline.train(batch)
                step.commit()
                if args.save and (step + 1) % args.save_every == 0:
                    pipeline.save(f"{args.save}/{step + 1}.pt")
                if dist.get_rank() == 0:
                    print(f"step {step} loss {loss.item():.12f}", flush=True)


if __name__ == "__main__":
    main()
