"""The part of a worker's environment that depends on its generation.

The agent sets it when it starts a worker; after a change of size the worker sets it itself.
"""

from __future__ import annotations

from etc_agent.control.channel import GENERATION_VARIABLE
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot

PARALLEL_VARIABLE = "ETC_PARALLEL"


def generation_variables(generation: Generation, slot: Slot) -> dict[str, str]:
    """The variables of the worker at `slot` that depend on the generation, named as torchrun names them.

    LOCAL_RANK is not among them: the slot's device does not change.
    """
    rank, nodes, mates = generation.placement.index(slot), generation.nodes, generation.role_mates(slot)
    world_size = str(generation.config.num_ranks)
    host, _, port = generation.store.rpartition(":")
    return {
        "RANK": str(rank),
        "ROLE_RANK": str(mates.index(slot)),
        "WORLD_SIZE": world_size,
        "ROLE_WORLD_SIZE": str(len(mates)),
        "LOCAL_WORLD_SIZE": str(sum(each.node == slot.node for each in generation.placement)),
        "GROUP_RANK": str(nodes.index(slot.node)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        GENERATION_VARIABLE: str(generation.id),
        PARALLEL_VARIABLE: str(generation.config),
    }
