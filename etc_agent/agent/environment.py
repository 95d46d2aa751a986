"""The environment of a worker: all that torchrun sets, and how to reach the agent."""

from __future__ import annotations

import os
from collections.abc import Mapping

from etc_agent.control.channel import GENERATION_VARIABLE, JOINING_VARIABLE, SLOT_VARIABLE, SOCKET_VARIABLE
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot

PARALLEL_VARIABLE = "ETC_PARALLEL"


def worker_environment(
    generation: Generation,
    slot: Slot,
    *,
    run_id: str,
    role: str,
    num_fresh: int,
    max_restarts: int,
    control_socket: str,
    joining: bool,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """What the worker in `slot` finds in its environment. `num_fresh`: how often all workers were started before.

    The store prefix of ``env://`` contains TORCHELASTIC_RESTART_COUNT, so that count must differ between any two fresh
    generations that may meet at one store: it counts fresh starts, of which failures are one kind.
    """
    rank, nodes = generation.placement.index(slot), generation.nodes
    host, _, port = generation.store.rpartition(":")
    world_size = str(generation.config.num_ranks)
    environment = {
        **extra,
        "RANK": str(rank),
        "LOCAL_RANK": str(slot.index),
        "GROUP_RANK": str(nodes.index(slot.node)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": role,
        "LOCAL_WORLD_SIZE": str(sum(other.node == slot.node for other in generation.placement)),
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(num_fresh),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        SOCKET_VARIABLE: control_socket,
        SLOT_VARIABLE: str(slot.index),
        GENERATION_VARIABLE: str(generation.id),
        PARALLEL_VARIABLE: str(generation.config),
    }
    if joining:
        environment[JOINING_VARIABLE] = "1"
    return environment
