"""Amendments: what a script has changed since `build`: parameters that it froze or unfroze, modules that it put into
evaluation mode, parameter groups that it added to the optimizer.

`build` does not know of these changes when it makes the next generation. So each worker states what it finds changed,
by names of the unsharded model, and every worker of the next generation repeats the changes on what `build` has made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar

import torch
from torch import nn

from etc_agent.errors import EtcError
from etc_agent.integrations.optimizer_state import create_optimizer_state
from etc_agent.integrations.tensors import optimizer_parameters
from etc_agent.integrations.train_state import TrainState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flags:
    """`trainable`: parameter -> `requires_grad`. `with_state`: parameter -> whether the optimizer has state for it.
    `training`: module -> its mode. `groups`: the names in each parameter group."""

    trainable: dict[str, bool]
    with_state: dict[str, bool]
    training: dict[str, bool]
    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, state: TrainState) -> Self:
        params = dict(state.model.named_parameters())
        updated, groups = {}, []
        if state.optimizer is not None:
            updated = optimizer_parameters(state.model, state.optimizer)
            names = {id(param): name for name, param in updated.items()}
            groups = [tuple(names[id(param)] for param in group["params"]) for group in state.optimizer.param_groups]
        return cls(
            trainable={name: param.requires_grad for name, param in params.items()},
            with_state={name: _has_state(state, param) for name, param in updated.items()},
            training={name: module.training for name, module in state.model.named_modules()},
            groups=tuple(groups),
        )


@dataclass(frozen=True, slots=True)
class Built:
    """What `build` made, as far as scripts may change it. `numbers`: ``module.attribute`` -> a plain number."""

    flags: Flags
    numbers: dict[str, float]

    @classmethod
    def of(cls, state: TrainState) -> Self:
        return cls(Flags.of(state), _plain_numbers(state))


@dataclass(frozen=True, slots=True)
class Amendments:
    """The difference between a state and what `build` made. `trainable`, `with_state` and `training` contain only
    entries that changed, with the present value; `added_groups` the names in each parameter group that was added."""

    trainable: dict[str, bool] = field(default_factory=dict)
    with_state: dict[str, bool] = field(default_factory=dict)
    training: dict[str, bool] = field(default_factory=dict)
    added_groups: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, state: TrainState) -> Self:
        """What differs from `state.as_built`.

        Raises:
            EtcError: the optimizer's groups were changed in another way than by adding some.
        """
        if state.as_built is None:
            return cls()
        built, now = state.as_built.flags, Flags.of(state)
        if now.groups[: len(built.groups)] != built.groups:
            index = next(i for i, names in enumerate(built.groups) if now.groups[i : i + 1] != (names,))
            raise EtcError(
                f"the script has changed the parameters in group {index} of the optimizer, which cannot be carried; "
                "make the groups in build(), or add new ones with add_param_group"
            )
        return cls(
            trainable=_changed(built.trainable, now.trainable),
            # Everything in an added group is new.
            with_state=_changed(built.with_state, now.with_state),
            training=_changed(built.training, now.training),
            added_groups=now.groups[len(built.groups) :],
        )

    def check_same(self, now: Amendments) -> None:
        """Check that nothing has changed since the change was prepared with these amendments.

        Raises:
            EtcError: something was; the message names it.
        """
        if self != now:
            names = sorted({name for name, _ in self._parts() ^ now._parts()})
            raise EtcError(
                f"{', '.join(names)}: frozen, unfrozen, given to the optimizer or put into "
                "another mode since the change was prepared; it has to be prepared again"
            )

    def to_json(self) -> dict[str, Any]:
        """Empty where nothing was changed."""
        return {key: value for key, value in asdict(self).items() if value}

    @classmethod
    def merged(cls, said: Sequence[Mapping[str, Any]]) -> Self:
        """The amendments of all workers of the previous generation; `said` has each one's `to_json`.

        Raises:
            EtcError: two workers contradict each other.
        """
        groups: list[dict[str, None]] = []
        for row in said:
            for index, names in enumerate(row.get("added_groups", ())):
                if index == len(groups):
                    groups.append({})
                groups[index] |= dict.fromkeys(names)
        return cls(
            trainable=_union("requires_grad", [row.get("trainable", {}) for row in said]),
            with_state=_union("having optimizer state", [row.get("with_state", {}) for row in said]),
            training=_union("training", [row.get("training", {}) for row in said]),
            added_groups=tuple(map(tuple, groups)),
        )

    def apply(self, state: TrainState) -> None:
        """Repeat the changes on what `build` has made for another generation, which is on the meta device.

        Raises:
            EtcError: the optimizer does not take the groups, or its state cannot be prepared.
        """
        params = dict(state.model.named_parameters())
        for names in self.added_groups:
            assert state.optimizer is not None
            state.optimizer.add_param_group({"params": [params[name] for name in names if name in params]})
        create_optimizer_state(state, {name for name, has_state in self.with_state.items() if has_state})
        for name, has_state in self.with_state.items():
            if not has_state and name in params and state.optimizer is not None:
                state.optimizer.state.pop(params[name], None)
        for name, is_trainable in self.trainable.items():
            if name in params:
                params[name].requires_grad_(is_trainable)
        modules = dict(state.model.named_modules())
        for name, is_training in self.training.items():
            if name in modules:
                modules[name].training = is_training

    def _parts(self) -> set[tuple[str, Any]]:
        flags = (*self.trainable.items(), *self.with_state.items(), *self.training.items())
        return {*flags, *((name, index) for index, names in enumerate(self.added_groups) for name in names)}

    def names(self) -> set[str]:
        """The parameters that were changed."""
        return {*self.trainable, *self.with_state, *(name for group in self.added_groups for name in group)}


def changed_plain_numbers(state: TrainState) -> dict[str, tuple[float | None, float]]:
    """``module.attribute`` -> (value after `build` or None, value now), for plain Python numbers that have changed."""
    if state.as_built is None:
        return {}
    before = state.as_built.numbers
    return {
        name: (before.get(name), value) for name, value in _plain_numbers(state).items() if before.get(name) != value
    }


def _has_state(state: TrainState, param: torch.Tensor) -> bool:
    assert state.optimizer is not None
    entries = state.optimizer.state.get(param, {})
    return any(value is not None for value in entries.values())


def _plain_numbers(state: TrainState) -> dict[str, float]:
    """Numeric attributes of modules and of the optimizer; PyTorch's own are private, or `training`."""
    holders: list[tuple[str, Any]] = [
        (f"model.{name}" if name else "model", module) for name, module in state.model.named_modules()
    ]
    if state.optimizer is not None:
        holders.append(("optimizer", state.optimizer))
    return {
        f"{prefix}.{key}": value
        for prefix, holder in holders
        for key, value in vars(holder).items()
        if type(value) in (bool, int, float) and not (isinstance(holder, nn.Module) and key == "training")
        and not (key.startswith("_") and type(value) is bool)
    }


def _changed(before: Mapping[str, bool], now: Mapping[str, bool]) -> dict[str, bool]:
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def _union(what: str, parts: Sequence[Mapping[str, bool]]) -> dict[str, bool]:
    union: dict[str, bool] = {}
    for part in parts:
        for name, value in part.items():
            if union.setdefault(name, value) != value:
                raise EtcError(f"{name}: {what} is {value} on one rank and {union[name]} on another")
    return union
