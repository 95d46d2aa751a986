"""`Weights`: a job's first values from tensors that lie somewhere whole, of which each rank reads its part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Any, Final

import torch

from etc_agent.errors import EtcError, one_line
from etc_agent.integrations.sources import Part, Source, open_source
from etc_agent.integrations.tensors import shards_of
from etc_agent.integrations.train_state import Init, TrainState, Weights, init_steps
from etc_agent.state.layout import Shard
from etc_agent.torch_private.buffers import names_of_lasting

_log = logging.getLogger(__name__)

_MOST_NAMES: Final = 5

Gather = Callable[[Any], list[Any]]
"""JSON-able value of this rank -> the values of all ranks."""


def takes_weights(state: TrainState) -> bool:
    """Whether any of the first values come from `Weights`."""
    return any(isinstance(step, Weights) for step in init_steps(state.init))


def open_weights(state: TrainState, gather: Gather) -> None:
    """Replace the `Weights` in the `init` of `state`, which is on the meta device, by functions that read them. The
    names are compared first, over all ranks.

    Raises:
        EtcError: on every rank: a source cannot be read, lacks tensors of the model or has others; the message names
            some, and what to do.
    """
    if not takes_weights(state):
        return
    steps = init_steps(state.init)
    is_alone = len(steps) == 1
    state.init = tuple(_opened(state, step, is_alone, gather) if isinstance(step, Weights) else step for step in steps)


def check_weights(states: Sequence[TrainState]) -> None:
    """`open_weights` for the states of all ranks in one process, which are built under one config.

    Raises:
        EtcError: as there.
    """
    steps = [list(init_steps(state.init)) for state in states]
    is_alone = len(steps[0]) == 1
    for number, step in enumerate(list(steps[0])):
        if not isinstance(step, Weights):
            continue
        opened = [_Opened(state, own[number]) for state, own in zip(states, steps, strict=True)]
        said = [each.say(is_alone) for each in opened]
        error = next((each["error"] for each in said if each["error"]), "")
        if error:
            raise EtcError(error)
        opened[0].check_all_used({name for each in said for name in each["known"]})
        for own, each in zip(steps, opened, strict=True):
            own[number] = each.load
    for state, own in zip(states, steps, strict=True):
        state.init = tuple(own)


def fill_lost(state: TrainState, constructed: Mapping[str, torch.Tensor]) -> None:
    """Give the buffers that no checkpoint has, since they are not persistent, the values that their constructors
    compute. `constructed`: ``model.<fqn>`` -> the whole tensor. Those that it lacks, or has with another shape, are
    left."""
    lasting = _lasting(state)
    for shard, view in shards_of(state).items():
        name = shard.tensor.name
        given = constructed.get(name)
        is_lost = name.startswith("model.") and name.removeprefix("model.") not in lasting
        if is_lost and given is not None and given.device.type != "meta" and tuple(given.shape) == shard.tensor.shape:
            start = zip(shard.box.offset, shard.box.shape, strict=True)
            view.copy_(given[tuple(slice(first, first + size) for first, size in start)])


def has_lost_buffers(state: TrainState) -> bool:
    """Whether the model has buffers that no checkpoint has."""
    lasting = _lasting(state)
    return any(name not in lasting for name, _ in state.model.named_buffers())


def _lasting(state: TrainState) -> Set[str]:
    return names_of_lasting(state.model)


def _opened(state: TrainState, weights: Weights, is_alone: bool, gather: Gather) -> Init:
    opened, error = None, ""
    try:
        opened = _Opened(state, weights)
    except (EtcError, OSError, ValueError) as problem:
        error = one_line(problem)
    said = gather({"error": error} if opened is None else opened.say(is_alone))
    error = next((each["error"] for each in said if each["error"]), "")
    if error:
        raise EtcError(error)
    assert opened is not None
    opened.check_all_used({name for each in said for name in each["known"]})
    return opened.load


class _Opened:
    """`names`: the model's name -> its name in the source, for what is there."""

    def __init__(self, state: TrainState, weights: Weights) -> None:
        self._weights = weights
        self._source = open_source(weights.source)
        self._shown = "the state dict" if isinstance(weights.source, Mapping) else str(weights.source)
        self._groups = _names_of_same(state)
        self._lasting = _lasting(state)
        self._shards = [shard for shard in shards_of(state) if shard.tensor.name.startswith("model.")]
        self._prefix = self._found_prefix() if weights.names is None else ""
        self._optimizer = _OptimizerNames(self._source.names)

    def say(self, is_alone: bool) -> dict[str, Any]:
        """What the other ranks have to know: this rank's names, and what is wrong here."""
        named = self._named()
        missing = sorted({name for name in map(_own_name, self._shards) if name not in named and name in self._lasting})
        every = {self._in_source(name) for group in self._groups.values() for name in group} - {None}
        error = ""
        if missing and (is_alone or not named):
            error = (
                f"{self._shown} has no {_listed(missing)}; its names are like {_listed(sorted(self._source.names))}: "
                "give TrainState(init=etc_agent.Weights(..., names=function from the model's name to the one there)), "
                'or init=("module", ...) to start the rest from what the constructors compute'
            )
        for shard in self._shards:
            name = named.get(_own_name(shard))
            if name is not None and self._source.shape(name) != shard.tensor.shape and not error:
                error = (
                    f"{name} is {self._source.shape(name)} in {self._shown}, and build() makes {shard.tensor.name} "
                    f"{shard.tensor.shape}"
                )
        return {"error": error, "known": sorted(name for name in every if name is not None)}

    def check_all_used(self, known: Set[str]) -> None:
        """Raise EtcError where the source has tensors that no rank's model has."""
        ignore = self._weights.ignore
        left = [
            name for name in sorted(self._source.names - known)
            if name.startswith(self._prefix) and not self._optimizer.has(name)
            and not any(fnmatchcase(name, pattern) for pattern in (*ignore, *_OF_OURS))
        ]
        if left:
            raise EtcError(
                f"{self._shown} has {_listed(left)}, which the model has not; leave them out with TrainState(init="
                f"etc_agent.Weights(..., ignore=[{left[0]!r}])), where * stands for any part of a name, or give the "
                "names that the model has for them with names="
            )

    def load(self, state: TrainState) -> None:
        named, parts, loaded = self._named(), [], 0
        optimizer: dict[str, list[tuple[Shard, torch.Tensor]]] = {}
        for shard, view in shards_of(state).items():
            kind, _, rest = shard.tensor.name.partition(".")
            if kind == "optimizer":
                optimizer.setdefault(rest.rpartition(".")[0], []).append((shard, view))
            elif rest in named:
                parts.append(Part(named[rest], shard.box, view))
        for param, entries in optimizer.items():
            found = [self._optimizer.part(self._source, shard, view) for shard, view in entries]
            there = [part for part in found if part is not None]
            if there and len(there) < len(found):
                lacking = [shard.tensor.name for (shard, _), part in zip(entries, found, strict=True) if part is None]
                raise EtcError(f"{self._shown} has optimizer state of {param}, but no {_listed(lacking)}")
            parts += there
            loaded += bool(there)
        self._source.load(parts)
        if loaded:
            _log.info("the optimizer state of %d parameters is that of %s", loaded, self._shown)
        elif optimizer and self._optimizer.is_numbered:
            _log.warning(
                "the optimizer state in %s is by number and not by name, so it is not loaded; write checkpoints with "
                "torch.distributed.checkpoint.state_dict.get_state_dict", self._shown,
            )

    def _named(self) -> dict[str, str]:
        found = {}
        for shard in self._shards:
            own = _own_name(shard)
            names = map(self._in_source, self._groups.get(own, (own,)))
            there = next((name for name in names if name is not None and name in self._source.names), None)
            if there is not None:
                found[own] = there
        return found

    def _in_source(self, name: str) -> str | None:
        given = self._weights.names
        if given is None:
            return self._prefix + name
        return given.get(name, name) if isinstance(given, Mapping) else given(name)

    def _found_prefix(self) -> str:
        """What stands before the model's names in the source: nothing, or the same everywhere."""
        own = [name for name in map(_own_name, self._shards) if name in self._lasting]
        names = self._source.names
        if not own or any(name in names for group in self._groups.values() for name in group):
            return ""
        first = {name for name in own if name == own[0]} | set(self._groups.get(own[0], ()))
        prefixes = {there.removesuffix(name) for name in first for there in names if there.endswith(f".{name}")}
        fitting = sorted(
            prefix for prefix in prefixes
            if all(any(prefix + tied in names for tied in self._groups.get(name, (name,))) for name in own)
        )
        if len(fitting) > 1 and "model." not in fitting:
            raise EtcError(
                f"{self._shown} has the model's names several times, after {', '.join(fitting)}; say which with "
                f"TrainState(init=etc_agent.Weights(..., names=lambda name: {fitting[0]!r} + name))"
            )
        return "model." if "model." in fitting else fitting[0] if fitting else ""


_OF_OURS: Final = ("etc_run.*", "rng.*")
"""What else a checkpoint of etc-run has."""


class _OptimizerNames:
    """The optimizer's tensors in a source: ``optimizer.<fqn>.<key>`` as etc-run writes them, and
    ``...state.<fqn>.<key>`` as ``get_state_dict`` does."""

    def __init__(self, names: Set[str]) -> None:
        self._names: dict[str, str] = {}
        for name in names:
            before, found, rest = name.partition("state.")
            if found and (not before or before.endswith(".")) and "." in rest:
                self._names[rest] = name
            elif name.startswith("optimizer.") and not name.startswith("optimizer.param_groups."):
                self._names[name.removeprefix("optimizer.")] = name
        self._all = set(self._names.values())

    def has(self, name: str) -> bool:
        return name in self._all or ".param_groups." in name

    @property
    def is_numbered(self) -> bool:
        return any(name.partition(".")[0].isdigit() for name in self._names)

    def part(self, source: Source, shard: Shard, view: torch.Tensor) -> Part | None:
        name = self._names.get(shard.tensor.name.removeprefix("optimizer."))
        return Part(name, shard.box, view) if name is not None and source.shape(name) == shard.tensor.shape else None


def _own_name(shard: Shard) -> str:
    return shard.tensor.name.removeprefix("model.")


def _names_of_same(state: TrainState) -> dict[str, Sequence[str]]:
    """Every name of a parameter or buffer -> all names of the same one."""
    by_tensor: dict[int, list[str]] = {}
    params = state.model.named_parameters(remove_duplicate=False)
    for name, tensor in (*params, *state.model.named_buffers(remove_duplicate=False)):
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: names for names in by_tensor.values() for name in names}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


