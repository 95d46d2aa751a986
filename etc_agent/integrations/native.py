"""PyTorch-native state (DTensor, torch.optim) as boxes of logical tensors: the names that other rooms import."""

from etc_agent.integrations.host_state import host_state, load_host_state, rng_state, set_rng_state
from etc_agent.integrations.initial import WholeModel, start_values, takes_module_values, whole_model
from etc_agent.integrations.materialise import materialise
from etc_agent.integrations.optimizer_state import create_optimizer_state, reset_optimizer_state
from etc_agent.integrations.tensors import held_shards, shards_of
from etc_agent.integrations.train_state import TrainState

__all__ = [
    "TrainState",
    "WholeModel",
    "create_optimizer_state",
    "held_shards",
    "host_state",
    "load_host_state",
    "materialise",
    "reset_optimizer_state",
    "rng_state",
    "set_rng_state",
    "shards_of",
    "start_values",
    "takes_module_values",
    "whole_model",
]
