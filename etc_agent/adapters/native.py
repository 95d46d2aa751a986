"""The adapter for plain PyTorch: DTensors, hand-cut tensors with a layout, `torch.optim` optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch.distributed.fsdp import FSDPModule

from etc_agent.adapters import native_update
from etc_agent.adapters.own_dtype import own_default_dtype
from etc_agent.adapters.staying_on_meta import StayingOnMeta
from etc_agent.adapters.transformers import structure_alone
from etc_agent.errors import ConfigRefusedError, EtcError, named, one_line
from etc_agent.integrations import amendments, host_state, initial, parameter_values, tensors
from etc_agent.integrations.amendments import Amendments, Built
from etc_agent.integrations.initial import WholeModel
from etc_agent.integrations.json_values import Json
from etc_agent.integrations.materialise import Provide, materialise
from etc_agent.integrations.optimizer_state import create_optimizer_state
from etc_agent.integrations.parameter_values import ParameterValues
from etc_agent.integrations.tensors import Placed
from etc_agent.integrations.train_state import TrainState
from etc_agent.state.layout import Shard

if TYPE_CHECKING:
    from etc_agent.worker.context import ParallelContext

_ON_META: Final = (
    "it runs on the meta device, where tensors have no values, so it must not read them (item(), numpy()) or wrap the "
    "model in DistributedDataParallel: TrainState(activate=...) is where it is wrapped or compiled"
)


class Native:
    """See `protocol.Adapter`. `script`: the user's `build`; None for states that are made by hand."""

    gives_memory: Final = False

    def __init__(self, script: Callable[[ParallelContext], TrainState] | None = None) -> None:
        self.script = script

    def build(self, parallel: ParallelContext) -> TrainState:
        assert self.script is not None
        with torch.device("meta"), StayingOnMeta(), own_default_dtype(), structure_alone():
            try:
                state = self.script(parallel)
            except ValueError as error:
                raise ConfigRefusedError(one_line(error)) from error
            except Exception as error:
                if "meta" in str(error).lower():
                    raise EtcError(f"build() raised {named(error)}: {_ON_META}") from error
                raise
        if not isinstance(state, TrainState):
            raise EtcError(f"build() returned a {type(state).__name__}; it must return an etc_agent.TrainState")
        create_optimizer_state(state)
        state.as_built = Built.of(state)
        return state

    def enter(self, state: TrainState) -> None:
        """PyTorch's own process-wide state is the worlds' (`worker.world`)."""

    def rest(self, state: TrainState) -> None:
        """Reshard FSDP2 modules, which stay unsharded at the outermost level after a forward pass without backward,
        such as an evaluation between two steps."""
        for module in state.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # -- tensors -----------------------------------------------------------------------------------------------------

    def shards(self, state: TrainState) -> dict[Shard, torch.Tensor]:
        return tensors.shards_of(state)

    def held(self, state: TrainState) -> dict[Shard, torch.Tensor]:
        return tensors.held_shards(state)

    def places(self, state: TrainState) -> Mapping[str, Placed]:
        return tensors.places_of(state)

    def materialise(self, state: TrainState, provide: Provide) -> None:
        materialise(state, provide)

    def volatile(self, state: TrainState) -> set[Shard]:
        places = tensors.places_of(state)
        buffers = (f"model.{name}" for name, _ in state.model.named_buffers())
        return {shard for name in buffers for shard in places[name].shards}

    # -- the values at the job's start ---------------------------------------------------------------------------------

    def takes_module_values(self, state: TrainState) -> bool:
        return initial.takes_module_values(state)

    def whole(self, parallel: ParallelContext) -> WholeModel:
        assert self.script is not None
        return initial.whole_model(self.script(parallel))

    def start_values(self, state: TrainState, device: torch.device, whole: WholeModel | None) -> int:
        return initial.start_values(state, device, whole)

    # -- what is not tensors -------------------------------------------------------------------------------------------

    def host_state(self, state: TrainState) -> dict[str, Json]:
        return host_state.host_state(state)

    def load_host_state(self, state: TrainState, value: dict[str, Json]) -> None:
        host_state.load_host_state(state, value)

    def has_parameter_values(self, state: TrainState) -> bool:
        return parameter_values.has_parameter_values(state)

    def parameter_values(self, state: TrainState) -> ParameterValues:
        return parameter_values.parameter_values(state)

    def load_parameter_values(self, state: TrainState, gathered: Sequence[ParameterValues]) -> None:
        parameter_values.load_parameter_values(state, gathered)

    def amendments(self, state: TrainState) -> Amendments:
        return Amendments.of(state)

    def amend(self, state: TrainState, amendments: Amendments) -> None:
        amendments.apply(state)

    def changed_numbers(self, state: TrainState) -> Mapping[str, tuple[float | None, float]]:
        return amendments.changed_plain_numbers(state)

    # -- the update ----------------------------------------------------------------------------------------------------

    def prepare(self, state: TrainState) -> bool:
        return native_update.can_apply(state)

    def apply(self, state: TrainState, ok: bool) -> None:
        native_update.apply(state, ok)

    def publish(self, state: TrainState) -> None:
        """An optimizer of torch's leaves nothing to be spread."""

    def drop_gradients(self, state: TrainState) -> None:
        for parameter in state.model.parameters():
            parameter.grad = None

    def forbid_step(self, state: TrainState) -> Callable[[], None]:
        return native_update.forbid_step(state)

