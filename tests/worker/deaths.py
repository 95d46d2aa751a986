"""Deaths without notice, from within a script: SIGKILL of this process at a named point of a step or of a change.

Each point is reached by wrapping what the script or the session calls there; nothing of the session knows of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from etc_agent.integrations.native import TrainState
from etc_agent.worker import vote as votes
from etc_agent.worker.change.attempt import Attempt
from etc_agent.worker.change.modes.keeping import Keeping
from etc_agent.worker.change.modes.releasing import Releasing
from etc_agent.worker.step import Step

IN_A_STEP = ("forward", "backward", "before the vote", "in the vote", "after the vote", "in the optimizer")
"""Points that `dying_in` knows."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(run: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
    """`run`, but this process dies before it, or `after` it."""

    def run_and_die(*args: Any, **kwargs: Any) -> Any:
        if not after:
            die()
        run(*args, **kwargs)
        die()

    return run_and_die


@contextmanager
def dying_in(point: str, state: TrainState) -> Iterator[None]:
    """Die at that point of the step that is run inside."""
    parameters = list(state.model.parameters())
    match point:
        case "forward":
            last = [module for module in state.model.modules() if isinstance(module, nn.Linear)][-1]
            last.register_forward_pre_hook(dying(lambda *_: None))
        case "backward":
            parameters[0].register_post_accumulate_grad_hook(dying(lambda *_: None))
        case "before the vote":
            Step.commit = dying(Step.commit)
        case "in the vote":
            votes.minimum = _vote_and_die
        case "after the vote":
            votes.minimum = dying(votes.minimum, after=True)
        case "in the optimizer":
            assert state.optimizer is not None
            state.optimizer.step = dying(state.optimizer.step)
        case _:
            raise LookupError(point)
    yield


def die_in_a_change(point: str) -> None:
    """From now on, die at that point of the first change that comes to it."""
    match point:
        case "in a switch, before its vote":
            for mode in (Keeping, Releasing):
                mode.take_over = dying(mode.take_over)
        case "in a switch, in its vote":
            Attempt._vote = dying(Attempt._vote)
        case "in a switch, after its vote":
            Attempt.vote_to_commit = dying(Attempt.vote_to_commit, after=True)
        case _:
            raise LookupError(point)


def _vote_and_die(group: Any, ballot: votes.Ballot) -> votes.Ballot:
    """Die as soon as this rank's ballot is on its way."""
    values = torch.tensor([ballot.ok, ballot.armed], dtype=torch.int32)
    group.allreduce([values])
    die()
    raise AssertionError
