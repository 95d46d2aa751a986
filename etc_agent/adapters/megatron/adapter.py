"""The adapter for Megatron-Core: ``etc.session(Megatron(build), ...)``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from etc_agent.adapters.megatron import globals as megatron_globals
from etc_agent.adapters.megatron import update
from etc_agent.adapters.megatron.boxes import boxes_of, parts_of
from etc_agent.adapters.megatron.first_state import create_state
from etc_agent.adapters.megatron.globals import Globals
from etc_agent.adapters.megatron.quiet import OnMeta, WithoutDraws
from etc_agent.adapters.megatron.streams import Streams
from etc_agent.errors import ConfigRefusedError, EtcError, one_line
from etc_agent.integrations.amendments import Amendments
from etc_agent.integrations.host_state import load_extra
from etc_agent.integrations.initial import WholeModel
from etc_agent.integrations.json_values import Json, decode, encode
from etc_agent.integrations.materialise import Provide
from etc_agent.integrations.parameter_values import ParameterValues
from etc_agent.integrations.tensors import Placed
from etc_agent.integrations.train_state import TrainState
from etc_agent.state.layout import Shard

if TYPE_CHECKING:
    from etc_agent.worker.context import ParallelContext

FAKE: Final = "fake"
"""The backend of a world without peers, in which a layout is derived."""
_GLOBALS: Final = "megatron globals"
_BOXES: Final = "megatron boxes"
_BATCH: Final = "megatron global batch"
_OF_PARAMETERS: Final = ("params", "param_names")


class Megatron:
    """See `etc_agent.adapters.protocol`.

    `script` is what a Megatron-Core script has between ``initialize_model_parallel`` and its loop, as a function of the
    `ParallelContext`: it builds the chunks of this pipeline stage, wraps them in Megatron's DistributedDataParallel,
    makes the optimizer and the scheduler, and returns them as a TrainState (several chunks as an `nn.ModuleList`). It
    is called with `parallel_state` set up for the generation, with memory for its tensors, beside training.

    `groups`: further options of ``initialize_model_parallel``; the sizes are the session's.
    """

    gives_memory: Final = True

    def __init__(self, script: Callable[[ParallelContext], TrainState], **groups: Any) -> None:
        self._script = script
        self._groups = groups
        megatron_globals.install()

    def build(self, parallel: ParallelContext) -> TrainState:
        generation = Globals.new()
        if dist.get_backend() == FAKE:
            with megatron_globals.entered(generation), WithoutDraws(), OnMeta():
                generation.use_one_backend()
                return self._built(parallel, generation)
        if threading.current_thread() is threading.main_thread():
            # The job's start: nothing is trained yet, and the constructors compute the first values.
            megatron_globals.enter(generation)
            return self._built(parallel, generation)
        with megatron_globals.entered(generation), WithoutDraws():
            return self._built(parallel, generation)

    def _built(self, parallel: ParallelContext, generation: Globals) -> TrainState:
        config = parallel.config
        try:
            generation.groups.initialize_model_parallel(
                tensor_model_parallel_size=config.tp, pipeline_model_parallel_size=config.pp,
                context_parallel_size=config.cp, expert_model_parallel_size=config.ep, **self._groups,
            )
            state = self._script(parallel)
        except (ValueError, AssertionError) as error:
            raise ConfigRefusedError(one_line(error)) from error
        if not isinstance(state, TrainState):
            raise EtcError(f"build() returned a {type(state).__name__}; it must return an etc_agent.TrainState")
        if state.init is not None and not callable(state.init):
            raise EtcError(
                f"TrainState.init is {state.init!r}; with Megatron a job starts from what Megatron's constructors "
                "compute, and then from a function, which may load a checkpoint"
            )
        for part in _parts(state):
            create_state(part)
        state.memo |= {_GLOBALS: generation, _BATCH: parallel.global_batch}
        state.memo[_BOXES] = boxes_of(chunks_of(state), state.optimizer)
        state.extras["megatron_streams"] = Streams(generation)
        return state

    def enter(self, state: TrainState) -> None:
        megatron_globals.enter(state.memo[_GLOBALS])

    def rest(self, state: TrainState) -> None:
        """Megatron's modules always hold their own state."""

    # -- tensors -----------------------------------------------------------------------------------------------------

    def shards(self, state: TrainState) -> dict[Shard, torch.Tensor]:
        return dict(state.memo[_BOXES])

    def held(self, state: TrainState) -> dict[Shard, torch.Tensor]:
        return dict(state.memo[_BOXES])

    def places(self, state: TrainState) -> Mapping[str, Placed]:
        return {}

    def materialise(self, state: TrainState, provide: Provide) -> None:
        """`build` has given the tensors memory."""

    def volatile(self, state: TrainState) -> set[Shard]:
        return set()

    # -- the values at the job's start -------------------------------------------------------------------------------

    def takes_module_values(self, state: TrainState) -> bool:
        return False

    def whole(self, parallel: ParallelContext) -> WholeModel:
        raise EtcError("Megatron's constructors give each rank the values of its own part: there is no whole model")

    def start_values(self, state: TrainState, device: torch.device, whole: WholeModel | None) -> int:
        """What Megatron's constructors computed, then `TrainState.init`, if it is a function."""
        if not callable(state.init):
            return 0
        with torch.no_grad():
            step = state.init(state)
        for part in _parts(state):
            part.reload_model_params()
        return step if isinstance(step, int) else 0

    # -- what is not tensors -----------------------------------------------------------------------------------------

    def host_state(self, state: TrainState) -> dict[str, Json]:
        groups = [group for part in _parts(state) for group in part.optimizer.param_groups]
        return {
            "groups": encode([_hyperparameters(group) for group in groups], "param_groups"),
            "scaler": encode([scaler.state_dict() for scaler in _scalers(state)], "grad_scaler"),
            "scheduler": encode(state.scheduler.state_dict() if state.scheduler is not None else None, "scheduler"),
            "extras": encode({name: extra.state_dict() for name, extra in _replicated(state).items()}, "extras"),
        }

    def load_host_state(self, state: TrainState, value: dict[str, Json]) -> None:
        carried = {key: decode(item) for key, item in value.items()}
        groups = [group for part in _parts(state) for group in part.optimizer.param_groups]
        if len(carried["groups"]) != len(groups):
            raise EtcError(
                f"the optimizer has {len(groups)} parameter groups here and {len(carried['groups'])} where the state "
                "comes from; build() must make the same groups in every generation and on every rank"
            )
        if set(carried["extras"]) != set(_replicated(state)):
            raise EtcError(f"extras are {sorted(_replicated(state))} here and {sorted(carried['extras'])} before")
        if state.scheduler is not None:
            state.scheduler.load_state_dict(carried["scheduler"])
        for scaler, of_it in zip(_scalers(state), carried["scaler"], strict=True):
            scaler.load_state_dict(of_it)
        for name, extra in _replicated(state).items():
            load_extra(name, extra, carried["extras"][name])
        # Last: loading a scheduler may overwrite learning rates, and the carried ones are the right ones.
        for group, hyperparameters in zip(groups, carried["groups"], strict=True):
            group.update(hyperparameters)

    def has_parameter_values(self, state: TrainState) -> bool:
        return False

    def parameter_values(self, state: TrainState) -> ParameterValues:
        return {}

    def load_parameter_values(self, state: TrainState, gathered: Sequence[ParameterValues]) -> None: ...

    def amendments(self, state: TrainState) -> Amendments:
        return Amendments()

    def amend(self, state: TrainState, amendments: Amendments) -> None: ...

    def changed_numbers(self, state: TrainState) -> Mapping[str, tuple[float | None, float]]:
        return {}

    # -- the update ----------------------------------------------------------------------------------------------------

    def prepare(self, state: TrainState) -> bool:
        return state.optimizer is None or update.prepare(state.optimizer)

    def apply(self, state: TrainState, ok: bool) -> None:
        if ok and state.optimizer is not None:
            update.apply(state.optimizer)
            scheduler: Any = state.scheduler
            if scheduler is not None:
                scheduler.step(increment=state.memo[_BATCH])
        self.drop_gradients(state)

    def publish(self, state: TrainState) -> None:
        update.publish(chunks_of(state))

    def drop_gradients(self, state: TrainState) -> None:
        update.drop_gradients(chunks_of(state), state.optimizer)

    def forbid_step(self, state: TrainState) -> Callable[[], None]:
        return update.forbid_step(state.optimizer)


def chunks_of(state: TrainState) -> list[Any]:
    """The model's chunks on this pipeline stage."""
    return list(state.model) if isinstance(state.model, torch.nn.ModuleList) else [state.model]


def _parts(state: TrainState) -> list[Any]:
    return parts_of(state.optimizer) if state.optimizer is not None else []


def _scalers(state: TrainState) -> list[Any]:
    scalers = {id(scaler): scaler for part in _parts(state) if (scaler := getattr(part, "grad_scaler", None))}
    return list(scalers.values())


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OF_PARAMETERS}


def _replicated(state: TrainState) -> dict[str, Any]:
    extras = state.extras.items()
    return {name: extra for name, extra in extras if getattr(extra, "rule", "replicated") == "replicated"}
