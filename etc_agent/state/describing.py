"""The layout of a whole job from few of its ranks: replicas of one position hold the same, if spot checks agree."""

from __future__ import annotations

from collections.abc import Callable

from etc_agent.parallel.config import ParallelConfig
from etc_agent.state.layout import Layout, Manifest


def layout_by_class(config: ParallelConfig, manifest_of: Callable[[int], Manifest]) -> Layout:
    """Every rank's manifest; `manifest_of` is asked for two replicas of each position (of pp, cp, tp and ep), the first
    and the last. Where these differ, the replica decides what a rank holds (FSDP, ZeRO-1), and all ranks are asked for.

    Replicas between the two that differ from both are not noticed. A layout that is wrong costs bytes at a change, not
    correctness: workers compare what they really hold.
    """
    ranks_at: dict[tuple[int, ...], list[int]] = {}
    for rank in range(config.num_ranks):
        at = config.coordinate(rank)
        ranks_at.setdefault((at.pp, at.cp, at.tp, config.expert_part(rank)), []).append(rank)
    manifests: dict[int, Manifest] = {}
    for ranks in ranks_at.values():
        first, last = manifest_of(ranks[0]), manifest_of(ranks[-1]) if len(ranks) > 1 else None
        manifests[ranks[0]] = first
        if last is None:
            continue
        if first != last:
            return tuple(manifests.get(rank) or manifest_of(rank) for rank in range(config.num_ranks))
        manifests.update(dict.fromkeys(ranks, first))
    return tuple(manifests[rank] for rank in range(config.num_ranks))
