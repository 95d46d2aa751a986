"""Which parallel config the job should have now, and whether a request for another can be met."""

from __future__ import annotations

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.planner.choose import NoConfigError, choose_config
from etc_agent.reconfig.member import base_of
from etc_agent.reconfig.view import View
from etc_agent.reconfig.wanted import Largest, Nodes, Wanted, Workers


class NotDescribed(Exception):
    """The decision needs the model's layout under `config` first."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(str(config))
        self.config = config


def refusal(view: View, config: ParallelConfig) -> str | None:
    """Why `config` cannot be, or None where it can.

    Raises:
        NotDescribed: the model has to be asked first.
    """
    if why := view.policy.refuse(config):
        return why
    description = view.descriptions.get(config)
    if description is None and in_session(view):
        raise NotDescribed(config)
    return f"{config}: {description}" if isinstance(description, str) else None


def in_session(view: View) -> bool:
    """Every worker of the committed generation is alive and runs a session, so the job can change in place."""
    committed = view.committed
    if committed is None:
        return False
    if any(node not in view.live or view.ack(committed.id, node).failure for node in committed.nodes):
        return False
    first = view.generations[base_of(committed, view.generations)]
    return all(view.ack(first.id, node).in_session for node in first.nodes)


def meeting(view: View, wanted: Wanted, num_slots: int) -> ParallelConfig:
    """The config that meets `wanted` exactly on `num_slots` slots.

    Raises:
        NoConfigError: there is none; the message says why in one line.
        NotDescribed: the model has to be asked first.
    """
    if isinstance(wanted, ParallelConfig):
        if why := refusal(view, wanted):
            raise NoConfigError(why)
        if wanted.num_ranks > num_slots:
            raise NoConfigError(f"{wanted} needs {wanted.num_ranks} workers, and there are {num_slots} slots")
        return wanted
    if isinstance(wanted, Workers):
        if wanted.count > num_slots:
            raise NoConfigError(f"{wanted.count} workers are asked for, and there are {num_slots} slots")
        config = _largest(view, wanted.count)
        if config.num_ranks != wanted.count:
            raise NoConfigError(
                f"no possible parallel config has exactly {wanted.count} workers; the next smaller one is {config} "
                f"with {config.num_ranks}"
            )
        return config
    if isinstance(wanted, Nodes):
        if wanted.count > len(view.usable):
            raise NoConfigError(f"{wanted.count} nodes are asked for, and there are {len(view.usable)}")
        return _largest(view, sum(sorted((n.num_slots for n in view.usable), reverse=True)[: wanted.count]))
    return _largest(view, num_slots)


def target(view: View, wanted: Wanted) -> ParallelConfig:
    """The config for the present nodes: `wanted` where it can be met, else as it is, else the largest that fits.

    Raises:
        NoConfigError: nothing fits.
        NotDescribed: the model has to be asked first.
    """
    committed = view.committed
    try:
        config = meeting(view, wanted, view.num_usable_slots)
        if str(config) not in view.current.avoid:
            return config
    except NoConfigError:
        pass
    if committed is not None and committed.config.num_ranks <= view.num_usable_slots:
        must_move = any(node in view.leaving for node in committed.nodes)
        if not must_move or str(committed.config) not in view.current.avoid:
            return committed.config
    return _largest(view, view.num_usable_slots)


def check(view: View, wanted: Wanted) -> str | None:
    """Why `wanted` could never be met within `nnodes`, or None where it can be, now or when nodes come.

    Raises:
        NotDescribed: the model has to be asked first.
    """
    return _beyond_nnodes(view, wanted) or impossible(view, wanted)


def _beyond_nnodes(view: View, wanted: Wanted) -> str | None:
    policy, sizes = view.policy, view.node_sizes
    most = sum(sizes)
    shown = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
    admits = f"nnodes admits at most {most} ({shown} slots)"
    if isinstance(wanted, Nodes) and wanted.count > policy.max_nodes:
        return f"{wanted.count} nodes are asked for, but nnodes admits at most {policy.max_nodes}"
    if isinstance(wanted, Nodes) and wanted.count < policy.min_nodes:
        return f"{wanted.count} nodes are asked for, but nnodes wants at least {policy.min_nodes}"
    if isinstance(wanted, Workers) and wanted.count > most:
        return f"{wanted.count} workers are asked for, but {admits}"
    if isinstance(wanted, ParallelConfig) and wanted.num_ranks > most:
        return f"{wanted} needs {wanted.num_ranks} workers, but {admits}"
    return None


def impossible(view: View, wanted: Wanted) -> str | None:
    """Why `wanted` cannot be, however many slots there are; None where it can.

    Raises:
        NotDescribed: the model has to be asked first.
    """
    try:
        match wanted:
            case ParallelConfig():
                meeting(view, wanted, wanted.num_ranks)
            case Workers(count):
                meeting(view, wanted, count)
    except NoConfigError as error:
        return str(error)
    return None


def _largest(view: View, num_slots: int) -> ParallelConfig:
    committed = view.committed

    def feasible(config: ParallelConfig) -> str | None:
        if str(config) in view.current.avoid:
            return f"{config} was tried and withdrawn"
        return refusal(view, config)

    return choose_config(
        num_slots, view.policy.allowed, committed.config if committed else view.policy.initial, feasible=feasible
    )


def is_met(view: View, wanted: Wanted, generation: Generation) -> bool:
    """Whether `generation` is what is wanted."""
    if generation.is_held:
        return False
    try:
        return isinstance(wanted, Largest) or meeting(view, wanted, view.num_usable_slots) == generation.config
    except NoConfigError:
        return False
