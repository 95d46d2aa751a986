"""Adapter: what a training stack has to say about its state, so that a job on it can change size.

Everything from here on deals in boxes of logical tensors and in JSON. `native` is the adapter for plain PyTorch, and
the one of a `build` function that is given to the session as it is.

A step's update has three parts, since workers may be lost at any moment:

    prepare -> vote -> apply -> publish

*Prepare* may communicate, and changes nothing that a retried step would not make again. The vote makes all workers
apply the step, or none. *Apply* is local, so that no loss can tear it. *Publish* may communicate: it spreads what
apply has changed (an all-gather of parameters), and can be repeated in another generation if it breaks off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from etc_agent.integrations.amendments import Amendments
from etc_agent.integrations.initial import WholeModel
from etc_agent.integrations.json_values import Json
from etc_agent.integrations.materialise import Provide
from etc_agent.integrations.parameter_values import ParameterValues
from etc_agent.integrations.tensors import Placed
from etc_agent.integrations.train_state import TrainState
from etc_agent.state.layout import Shard

if TYPE_CHECKING:
    from etc_agent.worker.context import ParallelContext


class Adapter(Protocol):
    """One stack's way to build, describe, carry and update its state. All methods but `build` are given a state that
    `build` returned. Those that read a live state are called on the main thread, between two steps."""

    @property
    def gives_memory(self) -> bool:
        """Whether the tensors that `build` returns have memory. If not, `materialise` gives it to them, and old tensors
        can be released as new ones arrive."""

    def build(self, parallel: ParallelContext) -> TrainState:
        """This rank's part of the model and optimizer, in the process groups that the calling thread has entered. May
        run on another thread while the main thread trains, so it changes nothing process-wide; all ranks of the new
        generation call it together.

        Raises:
            ConfigRefusedError: the model cannot have this config.
        """

    def enter(self, state: TrainState) -> None:
        """The generation of `state` is in force from now on, and its process groups are active: make process-wide state
        its own. Does not communicate, and does not fail."""

    def rest(self, state: TrainState) -> None:
        """Have the modules hold their own state only, as between two steps."""

    # -- tensors -----------------------------------------------------------------------------------------------------

    def shards(self, state: TrainState) -> dict[Shard, torch.Tensor]:
        """Every box that this rank holds -> the part of a local tensor that it is, sharing its memory; each byte once.
        One local tensor may hold several boxes, of several logical tensors.

        Raises:
            EtcError: something is state and cannot be carried; the message names it.
        """

    def held(self, state: TrainState) -> dict[Shard, torch.Tensor]:
        """`shards`, and further names of the same bytes, by which another generation may ask for them."""

    def places(self, state: TrainState) -> Mapping[str, Placed]:
        """The tensors to which `materialise` gives memory, by name; those that are views of others included. Empty if
        `build` gave memory."""

    def materialise(self, state: TrainState, provide: Provide) -> None:
        """Give every tensor without memory that which `provide` returns."""

    def volatile(self, state: TrainState) -> set[Shard]:
        """The boxes to which a forward pass may write (buffers)."""

    # -- the values at the job's start ---------------------------------------------------------------------------------

    def takes_module_values(self, state: TrainState) -> bool:
        """Whether `start_values` needs the unsharded model."""

    def whole(self, parallel: ParallelContext) -> WholeModel:
        """The unsharded model as its constructors make it on the default device; called where values or buffers are
        taken from it.

        Raises:
            EtcError: constructors of this stack make no such model.
        """

    def start_values(self, state: TrainState, device: torch.device, whole: WholeModel | None) -> int:
        """Give a newly built state the values that the job starts with. Returns the first step."""

    # -- what is not tensors -------------------------------------------------------------------------------------------

    def host_state(self, state: TrainState) -> dict[str, Json]:
        """What is equal on every rank: schedule, hyperparameters, replicated extras."""

    def load_host_state(self, state: TrainState, value: dict[str, Json]) -> None: ...

    def has_parameter_values(self, state: TrainState) -> bool:
        """Whether the optimizer keeps values that are not tensors for single parameters."""

    def parameter_values(self, state: TrainState) -> ParameterValues: ...

    def load_parameter_values(self, state: TrainState, gathered: Sequence[ParameterValues]) -> None: ...

    def amendments(self, state: TrainState) -> Amendments:
        """What the script has changed since `build`."""

    def amend(self, state: TrainState, amendments: Amendments) -> None:
        """Repeat those changes on a newly built state."""

    def changed_numbers(self, state: TrainState) -> Mapping[str, tuple[float | None, float]]:
        """Plain numbers among attributes that have changed since `build` and are not carried: before, and now."""

    # -- the update ----------------------------------------------------------------------------------------------------

    def prepare(self, state: TrainState) -> bool:
        """Everything before the vote, communication included: whether this rank's gradients can be applied. Every rank
        calls it in every step."""

    def apply(self, state: TrainState, ok: bool) -> None:
        """Update parameters and optimizer state if the vote was `ok`; drop the gradients in any case. Local."""

    def publish(self, state: TrainState) -> None:
        """What every rank of the generation does together after `apply`. Called again in the next generation where a
        loss may have broken it off."""

    def drop_gradients(self, state: TrainState) -> None:
        """As before the first backward pass of a step."""

    def forbid_step(self, state: TrainState) -> Callable[[], None]:
        """Have a call of the optimizer's ``step`` by the script raise an EtcError, until the returned function is
        called."""
