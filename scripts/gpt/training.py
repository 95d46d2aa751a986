"""Build one rank's part of the GPT, and train it for a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from etc_agent.integrations.train_state import TrainState
from etc_agent.worker.context import ParallelContext
from gpt.gradients import clip_gradients, local_gradients, sum_over_dp
from gpt.model import Gpt, initialise_weights, tensor_parallel
from gpt.optimizer import LocalAdamW
from gpt.options import VOCABULARY, GptOptions
from gpt.tensor_parallel import drop_gradients, publish_gradients


@dataclass(frozen=True, slots=True)
class Runtime:
    """What one generation's steps need beside the state. `schedule` is None where there is one stage."""

    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    schedule: Schedule1F1B | None
    clip: float
    microbatch: int


def build(options: GptOptions, parallel: ParallelContext) -> TrainState:
    """This rank's part of the model and optimizer; runs on the meta device.

    Raises:
        OptionsError: the model cannot be trained with `parallel.config`.
    """
    config = parallel.config
    options.check(config)
    stage = parallel.coordinate.pp
    model = Gpt(options, config.pp, stage)
    if config.tp > 1:
        tensor_parallel(model, parallel.mesh["tp"])
    optimizer = LocalAdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_lr_factor, options))
    num_microbatches = options.num_microbatches(config)
    loss_of = partial(_microbatch_loss, num_microbatches * config.dp)
    schedule = None
    if config.pp > 1:
        schedule = Schedule1F1B(
            _pipeline_stage(model, options, parallel), num_microbatches, loss_fn=loss_of, scale_grads=False
        )
    return TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        runtime=Runtime(loss_of, schedule, options.clip, options.microbatch),
        init=partial(initialise_weights, options=options),
    )


def train(state: TrainState, parallel: ParallelContext, batch: torch.Tensor) -> float | None:
    """Gradients of one step's global batch, summed over dp and clipped; the update itself is the caller's.

    `batch`: this dp rank's samples, (samples, sequence + 1) int64. Returns the loss, averaged over the global batch, on
    every rank of the last stage; None elsewhere.
    """
    runtime: Runtime = state.runtime
    drop_gradients(state.model)
    inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    losses: list[torch.Tensor] = []
    if runtime.schedule is None:
        for microbatch, target in zip(
            inputs.split(runtime.microbatch), targets.split(runtime.microbatch), strict=True
        ):
            losses.append(runtime.loss_of(state.model(microbatch), target))
            losses[-1].backward()
    else:
        is_last = state.model.is_last
        runtime.schedule.step(
            *((inputs,) if state.model.is_first else ()),
            **({"target": targets, "losses": losses} if is_last else {}),
            return_outputs=False,
        )
    publish_gradients(state.model)
    summed = [torch.stack([loss.detach() for loss in losses]).sum().reshape(1)] if losses else []
    if parallel.config.dp > 1:
        sum_over_dp(local_gradients(state.model) + summed, parallel.mesh["dp"].get_group())
    if runtime.clip:
        clip_gradients(state.model, runtime.clip, parallel)
    return summed[0].item() if summed else None


def _pipeline_stage(model: Gpt, options: GptOptions, parallel: ParallelContext) -> PipelineStage:
    """A stage that knows the shapes of its inputs and outputs: nothing is inferred, or sent, to find them."""
    shape = (options.microbatch, options.sequence)
    hidden = torch.empty(*shape, options.hidden, device="meta", requires_grad=True)
    tokens = torch.empty(shape, device="meta", dtype=torch.int64)
    logits = torch.empty(*shape, VOCABULARY, device="meta", requires_grad=True)
    return PipelineStage(
        model,
        parallel.coordinate.pp,
        parallel.config.pp,
        parallel.device,
        input_args=(tokens if model.is_first else hidden,),
        output_args=(logits if model.is_last else hidden,),
        group=parallel.mesh["pp"].get_group(),
    )


def _microbatch_loss(num_microbatches: int, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A microbatch's share of the mean loss over the global batch."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) / num_microbatches


def _lr_factor(options: GptOptions, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    progress = min(1.0, (step - options.warmup) / max(1, options.steps - options.warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))
