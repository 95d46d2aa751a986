"""How many collectives the process groups of the calling thread's world have begun."""

from __future__ import annotations

from etc_agent.torch_private.c10d_world import world_object

NAMES = ("torch.distributed.ProcessGroup._get_sequence_number_for_group",)


def num_collectives() -> int:
    """Over all groups that torch.distributed knows; point-to-point messages do not count. A group whose backend does
    not count counts as 0."""
    return sum(_number(group) for group in world_object().pg_map)


def _number(group: object) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0
