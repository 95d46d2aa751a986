"""When a worker's new shards are allocated and its old ones freed, if both do not fit together (`release` mode).

Pure: derived from the plan alone, so that the peak is known, and too small a budget refused, before anything moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from etc_agent.migration.schedule import Schedule
from etc_agent.planner.transfers.plan import Refer
from etc_agent.state.layout import Shard


@dataclass(frozen=True, slots=True)
class Step:
    """`opens`: new shards allocated before the step's messages are posted. `refers`: local copies made then. `closes`:
    old shards that are freed when the step's messages are done."""

    opens: tuple[Shard, ...]
    refers: tuple[Refer, ...]
    closes: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """`local`: steps without messages, one new shard each, taken one after the other before round 0. `rounds`: one step
    for each round."""

    local: tuple[Step, ...]
    rounds: tuple[Step, ...]

    def peak_bytes(self, old_bytes: int, freed_bytes: Mapping[Shard, int], window: int) -> int:
        """The most bytes of old and new shards that the worker holds at one time.

        Args:
            old_bytes: what it holds at the start.
            freed_bytes: old shard -> bytes freed when it closes; nothing where other tensors share its storage.
            window: rounds in flight together: that many steps open before the first of them closes.
        """
        held = peak = old_bytes

        def opened(step: Step) -> None:
            nonlocal held, peak
            held += sum(shard.num_bytes for shard in step.opens)
            peak = max(peak, held)

        def closed(step: Step) -> None:
            nonlocal held
            held -= sum(freed_bytes.get(shard, 0) for shard in step.closes)

        for step in self.local:
            opened(step)
            closed(step)
        for number in range(len(self.rounds) + window - 1):
            if number < len(self.rounds):
                opened(self.rounds[number])
            if number >= window - 1:
                closed(self.rounds[number - window + 1])
        return peak


def lifetimes_of(schedule: Schedule, sources: Iterable[Shard]) -> Lifetimes:
    """The lifetimes of one worker's shards.

    A new shard opens with its first receive. One that is made of local parts only opens when its old shards have been
    sent for the last time, so that these can be freed right after. Shards that are kept whole keep their memory and do
    not appear here. A worker that leaves frees nothing: until it exits, the others can recover from its copy.
    """
    first_receive: dict[Shard, int] = {}
    last_send: dict[Shard, int] = {}
    for number, scheduled in enumerate(schedule.rounds):
        for message in scheduled.receives:
            for t in message.transfers:
                first_receive.setdefault(Shard(t.tensor, t.target_box), number)
        for message in scheduled.sends:
            for t in message.transfers:
                if not t.forwarded:
                    last_send[Shard(t.tensor, t.source_box)] = number
    parts: dict[Shard, list[Refer]] = {shard: [] for shard in first_receive}
    for refer in schedule.refers:
        if not refer.is_whole:
            parts.setdefault(Shard(refer.tensor, refer.target_box), []).append(refer)

    # Local steps are numbered up to -1, rounds from 0. The first local step only frees shards that nobody uses.
    opening: dict[Shard, int] = {}
    local: list[Shard] = []
    for target, refers in parts.items():
        sends = [last_send.get(Shard(r.tensor, r.source_box), -1) for r in refers]
        opening[target] = first_receive.get(target, max(sends, default=-1))
        if opening[target] < 0:
            local.append(target)
    for index, target in enumerate(local):
        opening[target] = index - len(local)
    last_use = dict(last_send)
    for target, refers in parts.items():
        for refer in refers:
            old = Shard(refer.tensor, refer.source_box)
            last_use[old] = max(last_use.get(old, opening[target]), opening[target])
    kept = {Shard(r.tensor, r.source_box) for r in schedule.refers if r.is_whole}
    first = -len(local) - 1
    opens: dict[int, list[Shard]] = defaultdict(list)
    closes: dict[int, list[Shard]] = defaultdict(list)
    for target, step in opening.items():
        opens[step].append(target)
    leaves = not opening and not kept
    for shard in sources:
        if shard not in kept and not leaves:
            closes[last_use.get(shard, first)].append(shard)

    def step_at(number: int) -> Step:
        refers = tuple(refer for target in opens[number] for refer in parts[target])
        return Step(tuple(opens[number]), refers, tuple(closes[number]))

    return Lifetimes(
        tuple(step_at(number) for number in range(first, 0)),
        tuple(step_at(number) for number in range(len(schedule.rounds))),
    )


def default_budget_bytes(old_bytes: int, new_bytes: int, shard_bytes: Iterable[int]) -> int:
    """The larger of old and new state plus 10 % of it or plus its two largest tensors, whichever is more; at least 1
    MiB extra, without which a state of many tiny tensors could not move at all."""
    larger = max(old_bytes, new_bytes)
    return larger + max(larger // 10, sum(sorted(shard_bytes)[-2:]), 1 << 20)
