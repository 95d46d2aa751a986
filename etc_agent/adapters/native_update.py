"""The two local halves of applying a step: the check before the vote, and the update after it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler

from etc_agent.errors import EtcError
from etc_agent.integrations.train_state import TrainState
from etc_agent.torch_private.grad_scaler import found_inf
from etc_agent.torch_private.sequence_numbers import num_collectives

_log = logging.getLogger(__name__)

_IS_KNOWN: Final = "whether step() communicates"


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
            _step(state)
        if state.scaler is not None and state.scaler.is_enabled():
            for found in found_inf(state.scaler, state.optimizer):
                found.fill_(0.0 if ok else 1.0)
            state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
    if state.scheduler is not None and ok and _steps_alone(state.scheduler):
        state.scheduler.step()


def _step(state: TrainState) -> None:
    """Step the optimizer, and say so if that communicates: in the generation's first update, since an optimizer does
    the same in every one."""
    optimizer = state.optimizer
    assert optimizer is not None
    if state.memo.setdefault(_IS_KNOWN, False):
        optimizer.step()
        return
    before = num_collectives()
    optimizer.step()
    state.memo[_IS_KNOWN] = True
    if num_collectives() > before:
        _log.warning(
            "%s.step() communicates with other workers: if one is lost in it, after the vote, the update is torn and "
            "all workers are restarted; give etc.session an adapter that divides the update (docs/adapters.md)",
            type(optimizer).__name__,
        )


def forbid_step(state: TrainState) -> Callable[[], None]:
    """Have ``optimizer.step()`` raise an EtcError until the function that is returned is called.

    A script for torchrun calls it, and with the step of `apply` every gradient would count twice.
    """
    if state.optimizer is None:
        return lambda: None
    return state.optimizer.register_step_pre_hook(_refuse_step).remove


def _refuse_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    raise EtcError(
        "the script called optimizer.step() in a step of the session; remove that call: step.commit() steps the "
        "optimizer, the scheduler and the gradient scaler, and clears the gradients"
    )


def _steps_alone(scheduler: LRScheduler) -> bool:
    """Whether it steps without a value that only the script has, such as the loss for ReduceLROnPlateau."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    takes_all = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(each.default is not each.empty or each.kind in takes_all for each in parameters)
