"""torchrun/trainer.py, elastic.

etc-run --standalone --nproc-per-node 4 examples/trainer.py
"""

from __future__ import annotations

import argparse

import torch
from torch.utils import data
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from etc_agent.hugging_face import ElasticTrainer

VOCABULARY, SEQUENCE = 96, 32


class Tokens(data.Dataset):
    """Counting upwards in steps of 1 to 5, as tokens."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first, step = torch.randint(1, 6, (2,), generator=torch.Generator().manual_seed(self.first + index))
        tokens = (first * 7 + torch.arange(SEQUENCE) * step) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Report(TrainerCallback):
    """Prints the loss of each step, and keeps the weights now and then."""

    def __init__(self, folder: str, every: int) -> None:
        self.folder, self.every = folder, every

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step - 1} loss {logs['loss']:.12f}", flush=True)
        if state.is_world_process_zero and "eval_loss" in logs:
            print(f"after {state.global_step} steps: loss {logs['eval_loss']:.6f} in the evaluation", flush=True)

    def on_step_end(self, args, state, control, model=None, **_) -> None:
        if self.folder and state.is_world_process_zero and state.global_step % self.every == 0:
            torch.save(model.state_dict(), f"{self.folder}/{state.global_step}.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--micro-batch", type=int, default=6, help="sequences per forward pass of a rank")
    parser.add_argument("--batch", type=int, default=24, help="sequences per step, over all ranks")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", default="/tmp/trainer", help="folder for checkpoints")
    parser.add_argument("--save", default="", help="folder for the weights")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    args = parser.parse_args()

    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=SEQUENCE, tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, args.dtype))
    trainer = ElasticTrainer(
        model=model,
        global_batch=args.batch,
        args=TrainingArguments(
            output_dir=args.output, max_steps=args.steps, per_device_train_batch_size=args.micro_batch,
            learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=10, seed=args.seed,
            train_sampling_strategy="sequential", logging_steps=1, eval_strategy="steps", eval_steps=20,
            save_strategy="steps", save_steps=40, save_total_limit=2, load_best_model_at_end=True,
            disable_tqdm=True, report_to="none", use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Tokens(0, 100_000),
        eval_dataset=Tokens(1_000_000, 30),
        callbacks=[Report(args.save, args.save_every), EarlyStoppingCallback(early_stopping_patience=1000)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
