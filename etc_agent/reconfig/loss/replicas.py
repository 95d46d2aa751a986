"""What a job survives: whether the survivors of a loss hold every part of the state between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from etc_agent.state.algebra import subtract_all
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout


def unheld(layout: Layout, lost: Collection[int]) -> str | None:
    """A tensor of which nobody holds a part any more once the workers of the `lost` ranks are gone; None where
    survivors hold all of it. `layout`: rank -> what it holds, copies of others' parts included where those count."""
    gone = frozenset(lost)
    names = {shard.tensor.name for rank in gone for shard in layout[rank]}
    held: dict[str, set[Box]] = {}
    for rank, manifest in enumerate(layout):
        if rank not in gone:
            for shard in manifest:
                if shard.tensor.name in names:
                    held.setdefault(shard.tensor.name, set()).add(shard.box)
    seen: set[tuple[str, Box]] = set()
    for rank in sorted(gone):
        for shard in layout[rank]:
            name, box = shard.tensor.name, shard.box
            if (name, box) in seen:
                continue
            seen.add((name, box))
            boxes: Iterable[Box] = held.get(name, ())
            if box not in boxes and subtract_all(box, boxes):
                return name
    return None
