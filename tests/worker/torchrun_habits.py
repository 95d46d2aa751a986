"""What scripts that were written for torchrun do first in a session: prints, case by case, what they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import etc_agent as etc

STEPS = 3


def built(wrap: Callable[[nn.Module], Any] = lambda model: model, **options: Any) -> Callable[..., etc.TrainState]:
    def build(parallel: etc.ParallelContext) -> etc.TrainState:
        model = nn.Linear(2, 2)
        model = wrap(model)
        return etc.TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0), **{"init": "module"} | options)

    return build


def with_plateau(parallel: etc.ParallelContext) -> etc.TrainState:
    state = built()(parallel)
    state.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(state.optimizer, patience=0, factor=0.5)
    return state


KEPT = nn.Linear(2, 2, device="meta")


def nothing(session: etc.Session) -> None:
    pass


def step_it(session: etc.Session) -> None:
    session.state.optimizer.step()


CASES: dict[str, tuple[Callable[..., etc.TrainState], Callable[[etc.Session], None], Callable[[etc.Session], None]]] = {
    "own step": (built(), step_it, nothing),
    "own step between two steps": (built(), nothing, step_it),
    "plateau": (with_plateau, nothing, lambda session: session.state.scheduler.step(1.0)),
    "item": (built(lambda model: model.weight.sum().item()), nothing, nothing),
    "numpy": (built(lambda model: model.weight.detach().numpy()), nothing, nothing),
    "to": (built(lambda model: model.to("cpu")), nothing, nothing),
    "ddp": (built(nn.parallel.DistributedDataParallel), nothing, nothing),
    "kept": (built(lambda model: KEPT), nothing, nothing),
    "init returns text": (built(init=lambda state: "12"), nothing, nothing),
    "init loads": (
        built(init=lambda state: state.model.load_state_dict(nn.Linear(2, 2).state_dict())), nothing, nothing
    ),
}


def main() -> None:
    for name, (build, in_step, after_step) in CASES.items():
        try:
            with etc.session(build) as session:
                for step in session.steps(STEPS):
                    with step:
                        session.state.model(torch.ones(2)).sum().backward()
                        in_step(session)
                        step.commit()
                    after_step(session)
                print(f"{name}: lr {session.state.optimizer.param_groups[0]['lr']}")
        except etc.EtcError as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()
