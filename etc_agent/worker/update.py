"""The two local halves of applying a step: the check before the vote, and the update after it."""

from __future__ import annotations

from etc_agent.integrations.native import TrainState
from etc_agent.torch_private.grad_scaler import found_inf


def can_apply(state: TrainState) -> bool:
    """Whether this rank's gradients can be applied: with a gradient scaler, unscaled and all finite.

    A script may have called ``scaler.unscale_`` itself, in order to clip gradients.
    """
    if state.scaler is None or state.optimizer is None or not state.scaler.is_enabled():
        return True
    if not found_inf(state.scaler, state.optimizer):
        state.scaler.unscale_(state.optimizer)
    return not any(bool(found.item()) for found in found_inf(state.scaler, state.optimizer))


def apply(state: TrainState, ok: bool) -> None:
    """Step the optimizer and scheduler if the vote was `ok`; in any case drop the gradients and update the scaler.

    The scaler is given the result of the vote, not this rank's own check, so that all ranks keep the same scale.
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
