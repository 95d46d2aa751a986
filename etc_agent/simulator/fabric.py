"""Plans executed on a simulated fabric with rendezvous sends, and their time on modelled ports.

A rendezvous send completes only once its receive is posted, as large messages do; a plan that hides a cycle of waits
stops here. Every worker runs its own program: post all transfers of its next round, wait for all of them, go on.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np

from etc_agent.parallel.topology import Slot, Topology
from etc_agent.planner.placing.loads import ports_of
from etc_agent.planner.transfers.plan import MigrationPlan, Transfer


class DeadlockError(RuntimeError):
    """Workers wait for each other for ever; the message says who waits in which round."""


def execute(plan: MigrationPlan, *, seed: int = 0) -> list[Transfer]:
    """The transfers in an order in which they complete; `seed` varies who is fast.

    Messages between two workers match in the order they are posted, as point-to-point operations without tags do.

    Raises:
        DeadlockError: nobody can go on, or two workers expect different messages of each other.
    """
    rng = random.Random(seed)
    programs = [
        deque(
            own for transfers in plan.rounds if (own := [t for t in transfers if worker in (t.source, t.target)])
        )
        for worker in range(plan.num_workers)
    ]
    sends: dict[tuple[int, int], deque[Transfer]] = {}
    receives: dict[tuple[int, int], deque[Transfer]] = {}
    waiting = [0] * plan.num_workers
    ready = [worker for worker in range(plan.num_workers) if programs[worker]]
    done: list[Transfer] = []
    while ready:
        worker = ready.pop(rng.randrange(len(ready)))
        own = programs[worker].popleft()
        waiting[worker] = len(own)
        touched = set()
        for transfer in own:
            pair = (transfer.source, transfer.target)
            table = sends if transfer.source == worker else receives
            table.setdefault(pair, deque()).append(transfer)
            touched.add(pair)
        for pair in sorted(touched):
            out, into = sends.get(pair, deque()), receives.get(pair, deque())
            while out and into:
                first, second = out.popleft(), into.popleft()
                if first != second:
                    raise DeadlockError(f"worker {pair[0]} sends {first}, worker {pair[1]} expects {second}")
                done.append(first)
                for end in pair:
                    waiting[end] -= 1
                    if not waiting[end] and programs[end]:
                        ready.append(end)
    stuck = [worker for worker in range(plan.num_workers) if waiting[worker] or programs[worker]]
    if stuck:
        raise DeadlockError(f"workers {stuck} wait for ever")
    return done


def seconds(plan: MigrationPlan, slots: Sequence[Slot], topology: Topology) -> float:
    """Time of the rounds one after the other, each as long as its busiest port; between nodes only.

    `slots`: worker -> slot. An upper bound: workers that share no port need not wait for each other.
    """
    ports = ports_of(topology, slots)
    total = 0.0
    for transfers in plan.rounds:
        sent, received = np.zeros(len(ports.names)), np.zeros(len(ports.names))
        for transfer in transfers:
            source, target = slots[transfer.source], slots[transfer.target]
            if source.node != target.node:
                sent[ports.of[source]] += transfer.num_bytes
                received[ports.of[target]] += transfer.num_bytes
        total += float((np.maximum(sent, received) / ports.bytes_per_s).max())
    return total
