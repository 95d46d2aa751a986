"""The environment of a worker: everything that torchrun sets, and how to reach the agent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from etc_agent.control.channel import JOINING_VARIABLE, SLOT_VARIABLE, SOCKET_VARIABLE
from etc_agent.control.environment import generation_variables
from etc_agent.errors import EtcError
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def worker_environment(
    generation: Generation,
    slot: Slot,
    *,
    run_id: str,
    launch_config: Any,
    restart_count: int,
    control_socket: str,
    joining: bool,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """The environment variables of the worker in `slot`. `launch_config`: torchrun's LaunchConfig.

    `restart_count`: how often failures have restarted the job; changes of membership do not count, as under torchrun.

    Raises:
        EtcError: ``--virtual-local-rank`` on a node that shows fewer devices than it has slots.
    """
    environment = {
        **extra,
        **generation_variables(generation, slot),
        **device_of(slot.index, is_virtual=launch_config.virtual_local_rank),
        "ROLE_NAME": launch_config.role,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(launch_config.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": launch_config.signals_to_handle,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        SOCKET_VARIABLE: control_socket,
        SLOT_VARIABLE: str(slot.index),
    }
    if joining:
        environment[JOINING_VARIABLE] = "1"
    return environment


def device_of(index: int, *, is_virtual: bool) -> dict[str, str]:
    """LOCAL_RANK of slot `index`. With ``--virtual-local-rank`` it is 0, and only the slot's device is visible."""
    if not is_virtual:
        return {"LOCAL_RANK": str(index)}
    visible = os.environ.get(_VISIBLE_DEVICES)
    devices = visible.split(",") if visible is not None else None
    if devices is not None and index >= len(devices):
        raise EtcError(
            f"--virtual-local-rank: {_VISIBLE_DEVICES}={visible} shows {len(devices)} devices, and local rank {index} "
            "has none; lower --nproc-per-node"
        )
    return {"LOCAL_RANK": "0", _VISIBLE_DEVICES: devices[index].strip() if devices is not None else str(index)}
