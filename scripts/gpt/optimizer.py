"""AdamW over DTensor parameters without DTensor operations."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates the local part of each DTensor parameter.

    The update is elementwise, so the result is the same, and DTensor's dispatcher, whose cache is empty in each new
    generation, is left out of the step. The state must exist before the first step, as a session makes it.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if not any(isinstance(param, DTensor) for group in self.param_groups for param in group["params"]):
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        torch.optim.AdamW.step(self._over_local_parts())
        return loss

    def _over_local_parts(self) -> torch.optim.AdamW:
        """An optimizer over plain tensors that share the storage of these parameters, their gradients and state.

        A second object, since a session reads the groups and state of this one from another thread at any time.
        """
        twin = object.__new__(torch.optim.AdamW)
        twin.__dict__.update(self.__dict__)
        twin._optimizer_step_pre_hooks = OrderedDict()
        twin._optimizer_step_post_hooks = OrderedDict()
        twin.state = defaultdict(dict)
        twin.param_groups = [{**group, "params": []} for group in self.param_groups]
        for group, twin_group in zip(self.param_groups, twin.param_groups, strict=True):
            for param in group["params"]:
                if param.grad is not None:
                    if param not in self.state:
                        raise RuntimeError("LocalAdamW has no state yet; call create_optimizer_state before training")
                    local = _local(param).detach()
                    local.grad = _local(param.grad)
                    twin_group["params"].append(local)
                    twin.state[local] = {key: _local(value) for key, value in self.state[param].items()}
        return twin


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
