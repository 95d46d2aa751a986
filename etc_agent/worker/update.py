"""The two local halves of a training step's update: what is found out before the vote, and what follows from it."""

from __future__ import annotations

from etc_agent.integrations.native import TrainState
from etc_agent.torch_private.grad_scaler import found_inf


def can_apply(state: TrainState) -> bool:
    """Whether this rank's gradients are fit to be applied: with a gradient scaler, unscaled and all finite.

    A script that has called ``scaler.unscale_`` itself, to clip gradients, is not in the way.
    """
    if state.scaler is None or state.optimizer is None or not state.scaler.is_enabled():
        return True
    if not found_inf(state.scaler, state.optimizer):
        state.scaler.unscale_(state.optimizer)
    return not any(bool(found.item()) for found in found_inf(state.scaler, state.optimizer))


def apply(state: TrainState, ok: bool) -> None:
    """Step optimizer and schedule if the vote was `ok`; in any case drop the gradients and update the scaler.

    The scaler hears what the vote said, not what this rank found: all ranks keep one scale.
    """
    if state.optimizer is not None:
        if ok:
            state.optimizer.step()
        if state.scaler is not None and state.scaler.is_enabled():
            for found in found_inf(state.scaler, state.optimizer):
                found.fill_(0.0 if ok else 1.0)
            state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
    if state.scheduler is not None and ok:
        state.scheduler.step()
