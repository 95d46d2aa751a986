"""A step's update with Megatron's optimizers, in the three parts that a session needs.

Megatron's ``optimizer.step()`` reduces norms, updates, and (the distributed optimizer) gathers parameters in one call.
Here everything that communicates before the update is *prepare*, and the gathering of parameters is *publish*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer

from etc_agent.adapters.megatron.boxes import parts_of
from etc_agent.errors import EtcError


@torch.no_grad()
def prepare(optimizer: MegatronOptimizer) -> bool:
    """Copy the gradients to the main ones, look for infinities, and clip. Collective. Whether they can be applied; the
    same on all ranks of a model replica."""
    if optimizer.prepare_grads():
        return False
    norm = optimizer.get_grad_norm()
    for part in parts_of(optimizer):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                parameters, max_norm=part.config.clip_grad, total_norm=norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    return True


@torch.no_grad()
def apply(optimizer: MegatronOptimizer) -> None:
    """Update this rank's main parameters and optimizer state, and with them its part of the model's parameters."""
    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer):
            MixedPrecisionOptimizer.step_with_ready_grads(part)
        else:
            part.step_with_ready_grads()


@torch.no_grad()
def publish(chunks: list[Any]) -> None:
    """Gather the parameters of which each data-parallel rank has updated a range. Collective; can be repeated."""
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False):
            chunk.start_param_sync(force_sync=True)


def drop_gradients(chunks: list[Any], optimizer: MegatronOptimizer | None) -> None:
    for chunk in chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()
    if optimizer is not None:
        optimizer.zero_grad()


def forbid_step(optimizer: MegatronOptimizer | None) -> Callable[[], None]:
    """Have ``optimizer.step()`` raise until the returned function is called."""
    if optimizer is None:
        return lambda: None

    def refuse(*args: Any, **options: Any) -> None:
        raise EtcError(
            "the script called optimizer.step() in a step of the session; remove that call: step.commit() steps the "
            "optimizer and the scheduler, and clears the gradients"
        )

    vars(optimizer)["step"] = refuse

    def allow() -> None:
        vars(optimizer).pop("step", None)

    return allow
