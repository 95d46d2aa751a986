"""Two-stage migration, what the paper's Fig. 9 compares its one-hop execution with."""

from __future__ import annotations

from dataclasses import replace

from etc_agent.parallel.topology import Placement, Topology
from etc_agent.planner.placing.model_atoms import model_atoms
from etc_agent.planner.placing.placement import place_atoms
from etc_agent.state.sharding import Sharding


def one_hop_and_two_stage_bytes(
    previous: Sharding, current: Sharding, previous_placement: Placement, topology: Topology
) -> tuple[int, int]:
    """(bytes moved in one hop, bytes moved by changing pp first and tp after that), both of least bytes."""
    between = Sharding(previous.model, replace(previous.config, pp=current.config.pp))
    direct = place_atoms(
        model_atoms(previous, current), topology.slots, previous_placement, topology, least="bytes"
    )
    first = place_atoms(
        model_atoms(previous, between), topology.slots, previous_placement, topology, least="bytes"
    )
    second = place_atoms(
        model_atoms(between, current), topology.slots, first.placement, topology, least="bytes"
    )
    return direct.moved_bytes, first.moved_bytes + second.moved_bytes
