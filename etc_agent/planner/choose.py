"""Chooses the parallel config for a given number of slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from etc_agent.parallel.config import ParallelConfig
from etc_agent.planner.errors import PlanError

_MAX_REASONS = 4

Feasible = Callable[[ParallelConfig], str | None]
"""Returns None if the job can run under the config, else the reason in one line."""


class NoConfigError(PlanError):
    """No parallel config fits; the message says what was tried and why it was refused."""


def choose_config(
    num_slots: int,
    allowed: Sequence[ParallelConfig] | None,
    current: ParallelConfig | None,
    *,
    feasible: Feasible,
) -> ParallelConfig:
    """The feasible config with the most ranks that `num_slots` slots can take.

    `allowed`: the only configs to consider; None for all. Among configs of equal size, those with the current tp come
    first, then those with the current pp (the least of the model moves), then those with the current cp and ep; without
    a current config those with the most dp, then the least pp; then those first in `allowed`.

    Raises:
        NoConfigError: none fits.
    """
    if num_slots < 1:
        raise NoConfigError(f"{num_slots} slots: a job needs at least one")
    refused: list[str] = []
    for num_ranks in range(num_slots, 0, -1):
        config = _first_feasible(num_ranks, allowed, current, feasible, refused)
        if config is not None:
            return config
    too_large = sum(config.num_ranks > num_slots for config in allowed) if allowed is not None else 0
    raise NoConfigError(f"no parallel config fits {num_slots} slots; {_why(refused, too_large)}")


def choose_exactly(
    num_ranks: int, allowed: Sequence[ParallelConfig] | None, current: ParallelConfig | None, *, feasible: Feasible
) -> ParallelConfig:
    """The feasible config with just `num_ranks` ranks; `choose_config` says which of several.

    Raises:
        NoConfigError: there is none.
    """
    refused: list[str] = []
    config = _first_feasible(num_ranks, allowed, current, feasible, refused)
    if config is None:
        raise NoConfigError(f"no parallel config has exactly {num_ranks} workers; {_why(refused, 0)}")
    return config


def _first_feasible(
    num_ranks: int,
    allowed: Sequence[ParallelConfig] | None,
    current: ParallelConfig | None,
    feasible: Feasible,
    refused: list[str],
) -> ParallelConfig | None:
    """The best feasible config of one size; the reasons against others are added to `refused`."""
    options = (
        every_config(num_ranks, current) if allowed is None
        else [each for each in allowed if each.num_ranks == num_ranks]
    )
    for config in sorted(options, key=_order(current)):
        reason = feasible(config)
        if reason is None:
            return config
        refused.append(reason if reason.startswith(f"{config}:") else f"{config}: {reason}")
    return None


def every_config(num_ranks: int, current: ParallelConfig | None = None) -> list[ParallelConfig]:
    """All splits of `num_ranks` over pp, tp and dp; with a current config that has cp or ep, each of them also with the
    largest part of those two degrees that divides its share of the ranks."""
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    splits = [(pp, tp, num_ranks // pp // tp) for pp in divisors for tp in divisors if num_ranks % (pp * tp) == 0]
    configs = [ParallelConfig(pp, tp, rest) for pp, tp, rest in splits]
    if current is not None and (current.cp, current.ep) != (1, 1):
        for pp, tp, rest in splits:
            cp, ep = math.gcd(rest, current.cp), math.gcd(rest, current.ep)
            configs.append(ParallelConfig(pp, tp, rest // cp, ep, cp))
    return list(dict.fromkeys(configs))


def _order(current: ParallelConfig | None) -> Callable[[ParallelConfig], tuple[int, ...]]:
    def key(config: ParallelConfig) -> tuple[int, ...]:
        if current is None:
            return (-config.dp, config.pp, config.tp)
        return (
            config.tp != current.tp,
            config.pp != current.pp,
            max(config.tp, current.tp) // min(config.tp, current.tp),
            max(config.pp, current.pp) // min(config.pp, current.pp),
            abs(config.cp - current.cp),
            abs(config.ep - current.ep),
            -config.dp,
            config.pp,
        )

    return key


def _why(refused: Sequence[str], too_large: int) -> str:
    parts = list(refused[:_MAX_REASONS])
    if len(refused) > _MAX_REASONS:
        parts.append(f"and {len(refused) - _MAX_REASONS} more")
    if too_large:
        parts.append(f"{too_large} allowed configs need more slots")
    return "; ".join(parts) or "none is allowed"
