"""Which parallel config the job should have now, and whether a request for another one can be met."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.planner.choose import NoConfigError, choose_config, choose_exactly
from etc_agent.reconfig.known.parts import base_of
from etc_agent.reconfig.known.view import View
from etc_agent.reconfig.sizes.given_up import announced, for_good, in_force, retry_in_s
from etc_agent.reconfig.sizes.wanted import Largest, Nodes, Wanted, Workers


class NotDescribed(Exception):
    """The decision needs the model's layout under `config` first: ask a worker (`Describe`)."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(str(config))
        self.config = config


class PutOffError(NoConfigError):
    """Changing to the wanted config failed the last time; it is tried again later."""


def refusal(view: View, config: ParallelConfig) -> str | None:
    """Why `config` is not possible, now or later; None where it is.

    Raises:
        NotDescribed: the model has to be asked first.
    """
    if why := view.policy.refuse(config) or for_good(view, config):
        return why
    description = view.descriptions.get(config)
    if description is None and in_session(view) and config not in view.undescribed:
        raise NotDescribed(config)
    return _named(config, description) if isinstance(description, str) else None


def _named(config: ParallelConfig, why: str) -> str:
    """`why` with the config named; some models name it in their message themselves."""
    return why if why.startswith(str(config)) else f"{config}: {why}"


def put_off(view: View, config: ParallelConfig) -> str | None:
    """Why a possible `config` is not tried now; None where it may be tried."""
    if why := view.undescribed.get(config):
        return f"{config}: no worker can say its layout: {why}; they are asked again in {view.policy.retry_s:g} s"
    given_up = in_force(view, config)
    if given_up is None or retry_in_s(view, config) <= 0:
        return None
    return f"{config}: {given_up.why}{announced(view, config)}"


def in_session(view: View) -> bool:
    """Whether every worker of the committed generation is alive and runs a session, so that the job can change in
    place.
    """
    committed = view.committed
    if committed is None:
        return False
    acks = [view.ack(committed.id, node) for node in committed.nodes]
    if any(ack.node not in view.live or ack.failure or ack.lost for ack in acks):
        return False
    first = view.generations[base_of(committed, view.generations)]
    return all(view.ack(first.id, node).in_session for node in first.nodes)


def meeting(view: View, wanted: Wanted, num_slots: int) -> ParallelConfig:
    """The config that meets `wanted` exactly on `num_slots` slots.

    Raises:
        PutOffError: there is one, which is tried again later.
        NoConfigError: there is none; the message says why in one line.
        NotDescribed: the model has to be asked first.
    """
    config = _possible(view, wanted, num_slots)
    if why := put_off(view, config):
        raise PutOffError(why)
    return config


def _possible(view: View, wanted: Wanted, num_slots: int) -> ParallelConfig:
    """As `meeting`, whether or not the config is put off."""
    if isinstance(wanted, ParallelConfig):
        if why := refusal(view, wanted):
            raise NoConfigError(why)
        if wanted.num_ranks > num_slots:
            raise NoConfigError(f"{wanted} needs {wanted.num_ranks} workers, and there are {num_slots} slots")
        return wanted
    if isinstance(wanted, Workers):
        if wanted.count > num_slots:
            raise NoConfigError(f"{wanted.count} workers are asked for, and there are {num_slots} slots")
        return choose_exactly(wanted.count, view.policy.allowed, _current(view), feasible=partial(refusal, view))
    if isinstance(wanted, Nodes):
        if wanted.count > len(view.usable):
            raise NoConfigError(f"{wanted.count} nodes are asked for, and there are {len(view.usable)}")
        return _largest(view, sum(sorted((len(view.admitted(n)) for n in view.usable), reverse=True)[: wanted.count]))
    return _largest(view, num_slots)


def target(view: View, wanted: Wanted) -> ParallelConfig:
    """The config for the present nodes: `wanted` where possible, else the present one, else the largest that fits.

    Raises:
        NoConfigError: nothing fits.
        NotDescribed: the model has to be asked first.
    """
    committed = view.committed
    is_leaving = committed is not None and any(node in view.leaving for node in committed.nodes)
    must_move = is_leaving or view.current.loss is not None
    try:
        config = meeting(view, wanted, view.num_usable_slots)
        if not must_move or in_force(view, config) is None:
            return config
    except NoConfigError:
        pass
    fits = committed is not None and committed.config.num_ranks <= view.num_usable_slots
    if committed is not None and fits and (not must_move or in_force(view, committed.config) is None):
        return committed.config
    return _largest(view, view.num_usable_slots, _untried if must_move else refusal)


def _untried(view: View, config: ParallelConfig) -> str | None:
    """As `refusal`, for a node that leaves and after a loss: neither can wait until a put-off config may be tried."""
    given_up = in_force(view, config)
    return refusal(view, config) or (given_up.why if given_up else view.undescribed.get(config))


def check(view: View, wanted: Wanted) -> str | None:
    """Why `wanted` can never be met within `nnodes`; None where it can be, now or when nodes join.

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
    """Why `wanted` is not possible with any number of slots; None where it is.

    Raises:
        NotDescribed: the model has to be asked first.
    """
    try:
        match wanted:
            case ParallelConfig():
                _possible(view, wanted, wanted.num_ranks)
            case Workers(count):
                _possible(view, wanted, count)
    except NoConfigError as error:
        return str(error)
    return None


def _largest(
    view: View, num_slots: int, obstacle: Callable[[View, ParallelConfig], str | None] = refusal
) -> ParallelConfig:
    return choose_config(num_slots, view.policy.allowed, _current(view), feasible=partial(obstacle, view))


def _current(view: View) -> ParallelConfig | None:
    """The present config, from which the planner measures how much would move."""
    return view.committed.config if view.committed else view.policy.initial


def is_met(view: View, wanted: Wanted, generation: Generation) -> bool:
    """Whether `generation` has the wanted size."""
    if generation.is_held:
        return False
    try:
        return isinstance(wanted, Largest) or meeting(view, wanted, view.num_usable_slots) == generation.config
    except NoConfigError:
        return False
