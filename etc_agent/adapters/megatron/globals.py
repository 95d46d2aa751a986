"""Megatron-Core's process-wide state, one set for each generation.

Megatron keeps its process groups in module-level variables of `parallel_state`, and its random streams in a tracker of
`tensor_parallel.random`. `build` runs beside training and needs those of the next generation, so each generation has a
copy of the module `parallel_state` of its own. The functions of the original module, which all of Megatron uses, answer
from the copy of the calling thread's generation: the one that the thread has entered, else the one in force.
"""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import random as megatron_random

_ANSWER = "_etc_answer"


@dataclass(slots=True, eq=False)
class Globals:
    """`groups`: a copy of the module `parallel_state`. `seeds`: the arguments of the call with which `build` has seeded
    the random streams, to be made when the generation is entered; None if there was none. `streams`: the states that
    the tracker is to have then instead, as far as they are carried."""

    groups: ModuleType
    seeds: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    streams: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def new(cls) -> Globals:
        spec = importlib.util.spec_from_file_location(parallel_state.__name__, parallel_state.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return cls(module)

    def use_one_backend(self) -> None:
        """Have all groups use the world's own backend: any other needs peers."""
        create = self.groups.create_group

        def create_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
            return create(*args, **options)

        vars(self.groups)["create_group"] = create_group


class _Present:
    """`in_force`: the generation of threads that have entered none. `originals`: functions as Megatron defines them."""

    in_force: Globals | None = None
    entered = threading.local()
    originals: ClassVar[dict[str, FunctionType]] = {}

    @classmethod
    def globals(cls) -> Globals:
        found = getattr(cls.entered, "globals", None) or cls.in_force
        if found is None:
            raise RuntimeError("Megatron's parallel_state is not initialised: this is outside of etc.session()")
        return found


def install() -> None:
    """Have Megatron's functions answer for the calling thread's generation. Does nothing the second time."""
    if _Present.originals:
        return
    for name, function in list(vars(parallel_state).items()):
        if inspect.isfunction(function) and function.__module__ == parallel_state.__name__:
            _redirect(function, partial(_of_thread, name))
    seeding = {
        "get_cuda_rng_tracker": _tracker, "model_parallel_cuda_manual_seed": _seed, "initialize_rng_tracker": _ignore,
    }
    for name, beside in seeding.items():
        function = getattr(megatron_random, name)
        original = FunctionType(
            function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
        )
        _Present.originals[name] = original
        _redirect(function, partial(_either, beside, original))


@contextmanager
def entered(generation: Globals) -> Iterator[None]:
    """Within the context, in this thread only, Megatron is in `generation`, which is being built beside training."""
    before = getattr(_Present.entered, "globals", None)
    _Present.entered.globals = generation
    try:
        yield
    finally:
        _Present.entered.globals = before


def is_beside_training() -> bool:
    """Whether the calling thread builds a generation that is not in force."""
    return getattr(_Present.entered, "globals", None) is not None


def enter(generation: Globals) -> None:
    """Put `generation` in force in every thread, and its random streams."""
    _Present.in_force = generation
    RotaryEmbedding.forward.cache_clear()
    if generation.seeds is not None:
        args, options = generation.seeds
        megatron_random.model_parallel_cuda_manual_seed(*args, **options)
    if generation.streams:
        set_streams(generation.streams)


def is_in_force(generation: Globals) -> bool:
    return _Present.in_force is generation


def set_streams(states: dict[str, torch.Tensor]) -> None:
    """Give the tracker's streams those states; others stay."""
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.set_states({**tracker.get_states(), **states})


def streams() -> dict[str, torch.Tensor]:
    """The states of the tracker's random streams, on the CPU; empty before it was seeded."""
    tracker = megatron_random.get_cuda_rng_tracker()
    return {name: state.clone() for name, state in tracker.get_states().items()}


def _of_thread(name: str) -> Callable[..., Any]:
    return getattr(_Present.globals().groups, name)


def _either(beside: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return beside if is_beside_training() else original


def _redirect(function: FunctionType, answer: Callable[[], Callable[..., Any]]) -> None:
    """Have `function`, under every name by which modules have imported it, call what ``answer()`` returns."""
    key = f"{_ANSWER}_{function.__name__}"
    function.__globals__[key] = answer
    function.__code__ = _calling(function.__name__, key)
    function.__defaults__ = function.__kwdefaults__ = None


def _calling(name: str, key: str) -> CodeType:
    namespace: dict[str, Any] = {}
    exec(f"def {name}(*args, **options):\n    return {key}()(*args, **options)\n", namespace)
    return namespace[name].__code__


class _NoTracker:
    """What a generation that is built beside training has for a tracker: its weights are not drawn, but migrate."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def is_initialized(self) -> bool:
        return True

    def add(self, name: str, seed: int) -> None: ...

    def reset(self) -> None: ...

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None: ...


def _tracker(*args: Any, **options: Any) -> _NoTracker:
    return _NoTracker()


def _seed(*args: Any, **options: Any) -> None:
    _Present.globals().seeds = args, options


def _ignore(*args: Any, **options: Any) -> None: ...
