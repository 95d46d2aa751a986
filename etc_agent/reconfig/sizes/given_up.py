"""Given-up configs: parallel configs that the job could not change to, and for how long they are not tried again.

What the model refuses is final until the next request. Everything else may pass (a worker that crashed while it joined,
too little memory, a slow node): the same config is tried again after `Policy.retry_s`, and after twice the time at each
further failure. After `MOST_TRIES` in a row another config of that size is used if there is one, otherwise the request
is refused; the config is then tried again after `REST` times `Policy.retry_s`. A failure that was caused by one node is
forgotten when that node goes.
"""

from __future__ import annotations

from dataclasses import replace

from etc_agent.control.causes import ErrorKind
from etc_agent.parallel.config import ParallelConfig
from etc_agent.reconfig.known.records import Current, GivenUp, Refusal
from etc_agent.reconfig.known.view import View

MOST_TRIES = 4
REST = 32


def in_force(view: View, config: ParallelConfig) -> GivenUp | None:
    """The record that `config` is given up, if there is one."""
    here = {node.instance for node in view.nodes} | {""}
    held = (each for each in view.current.given_up if each.config == str(config) and each.instance in here)
    return next((each for each in held if not _is_worn_out(each) or _left_s(view, each) > 0), None)


def for_good(view: View, config: ParallelConfig) -> str | None:
    """Why `config` is not possible until the next request; None where it may be tried, now or later."""
    given_up = in_force(view, config)
    if given_up is None:
        return None
    if given_up.kind is ErrorKind.MODEL:
        return given_up.why
    tried = f"{config} was tried {given_up.tries} times in vain, the last time: {given_up.why}"
    return tried if _is_worn_out(given_up) else None


def retry_in_s(view: View, config: ParallelConfig) -> float:
    """Seconds until `config` may be tried again; 0 where it may be now, inf where the model refuses it."""
    given_up = in_force(view, config)
    return max(0.0, _left_s(view, given_up)) if given_up is not None else 0.0


def with_refusal(view: View, config: ParallelConfig, refusal: Refusal) -> Current:
    """`view.current` with `config` recorded as given up because of `refusal`."""
    before = in_force(view, config)
    is_its_own = refusal.kind is ErrorKind.RAISED
    instance = next((node.instance for node in view.nodes if is_its_own and node.name == refusal.node), "")
    given_up = GivenUp(str(config), refusal.kind, str(refusal), before.tries + 1 if before else 1, instance)
    others = forgetting(view.current, config)
    return replace(others, given_up=(*others.given_up, given_up))


def forgetting(current: Current, config: ParallelConfig) -> Current:
    """`current` without a record about `config`."""
    return replace(current, given_up=tuple(each for each in current.given_up if each.config != str(config)))


def only_of_the_model(current: Current) -> Current:
    """`current` with only the configs that the model itself refuses: other reasons do not prevent a fresh start."""
    return replace(current, given_up=tuple(each for each in current.given_up if each.kind is ErrorKind.MODEL))


def announced(view: View, config: ParallelConfig) -> str:
    """When a config that was just given up is tried again, as the end of a sentence for people."""
    given_up = in_force(view, config)
    if given_up is None or given_up.kind is ErrorKind.MODEL:
        return ""
    pause = f"in {_pause_s(view, given_up):g} s (timeouts.retry_s)"
    if _is_worn_out(given_up):
        return f"; it was tried {MOST_TRIES} times and is left alone until the next request, or is tried again {pause}"
    return f"; it is tried again {pause}, {given_up.tries} of {MOST_TRIES} times went wrong"


def _is_worn_out(given_up: GivenUp) -> bool:
    return given_up.kind is not ErrorKind.MODEL and given_up.tries >= MOST_TRIES


def _pause_s(view: View, given_up: GivenUp) -> float:
    if given_up.kind is ErrorKind.MODEL:
        return float("inf")
    return view.policy.retry_s * (REST if _is_worn_out(given_up) else 2 ** (given_up.tries - 1))


def _left_s(view: View, given_up: GivenUp) -> float:
    """Seconds left. They count from the last change of `current`; a new leader counts from when it began to lead."""
    return _pause_s(view, given_up) - view.phase_s
