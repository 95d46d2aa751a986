"""The norm of the gradients of a whole model, whatever the meshes and pipeline stages over which it is divided."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from etc_agent.torch_private.foreach import multiply, norms
from etc_agent.worker.change.exchange import gather_json
from etc_agent.worker.context import ParallelContext

_SMALLEST = 1e-6
"""As in torch.nn.utils.clip_grad_norm_: added to the norm that is divided by."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """Clips the gradients of one generation. `parameters`: of this rank, and the number of pipeline stages that hold
    each of them, by its name. `num_ranks`: of a stage."""

    parameters: tuple[tuple[nn.Parameter, int], ...]
    num_ranks: int

    @classmethod
    def of(cls, model: nn.Module, parallel: ParallelContext) -> Clipping:
        """For this rank's part of a model. Collective over the pipeline, if there is one."""
        named, stages = dict(model.named_parameters()), Counter[str]()
        if parallel.config.pp > 1:
            for names in gather_json(parallel.mesh.get_group("pp"), list(named)):
                stages.update(names)
        held = tuple((parameter, stages.get(name, 1)) for name, parameter in named.items())
        return cls(held, parallel.config.num_ranks // parallel.config.pp)

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """See `Session.clip_grad_norm_`."""
        gradients = [
            _local(parameter.grad, self.num_ranks * stages) for parameter, stages in self.parameters
            if parameter.grad is not None
        ]
        total = self._norm(gradients, norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; with "
                "error_if_nonfinite=False they are scaled by it anyway"
            )
        factor = (max_norm / (total + _SMALLEST)).clamp(max=1.0)
        for (device, _), alike in _alike(gradients).items():
            multiply([gradient.local for gradient in alike], factor.to(device))
        return total

    def _norm(self, gradients: list[_Gradient], order: float) -> torch.Tensor:
        device = self.parameters[0][0].device if self.parameters else torch.device("cpu")
        parts = [torch.zeros((), dtype=torch.float64, device=device)]
        for alike in _alike([gradient for gradient in gradients if gradient.local.numel()]).values():
            found = torch.stack(norms([gradient.local for gradient in alike], order)).to(device, torch.float64)
            if not math.isinf(order):
                copies = torch.tensor([gradient.copies for gradient in alike], dtype=torch.float64, device=device)
                found = found.pow(order) / copies
            parts.append(found.max() if math.isinf(order) else found.sum())
        total = torch.stack(parts).max() if math.isinf(order) else torch.stack(parts).sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM)
        return (total if math.isinf(order) else total.pow(1.0 / order)).to(torch.get_default_dtype())


@dataclass(frozen=True, slots=True)
class _Gradient:
    """This rank's part of a gradient, and how many ranks hold that part."""

    local: torch.Tensor
    copies: int


def _local(gradient: torch.Tensor, num_ranks: int) -> _Gradient:
    """`num_ranks`: over which the whole gradient is divided or repeated."""
    if not isinstance(gradient, DTensor):
        return _Gradient(gradient, num_ranks)
    placements = gradient.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(
            f"clip_grad_norm_ needs gradients that are summed up, and one of shape {tuple(gradient.shape)} is placed "
            f"as {placements}: redistribute it before"
        )
    parts = [
        size for size, placement in zip(gradient.device_mesh.shape, placements, strict=True)
        if not isinstance(placement, Replicate)
    ]
    return _Gradient(gradient.to_local(), num_ranks // math.prod(parts))


def _alike(gradients: list[_Gradient]) -> dict[tuple[torch.device, torch.dtype], list[_Gradient]]:
    """By device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[_Gradient]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.local.device, gradient.local.dtype].append(gradient)
    return groups
