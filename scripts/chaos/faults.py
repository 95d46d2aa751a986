"""What can be done to a job: each fault with what it does, when it can be done, and what may follow from it."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from chaos.cluster import LEASE_S, Cluster, Node, send


class Nature(StrEnum):
    """What a fault may lead to. `PLANNED`: changes in place, nothing else. `HARMLESS`: nothing. `LOSS`: changes in
    place that may cost the step under way; a restart from a checkpoint only where nobody else held a part of the state.
    """

    PLANNED = "planned"
    HARMLESS = "harmless"
    LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was done. After `hold_s` seconds `undo` ends it. `request`: the revision of a request for a size."""

    what: str
    hold_s: float = 0.0
    undo: Callable[[], None] = lambda: None
    request: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """`inject` returns None where the fault cannot be done now."""

    kind: str
    nature: Nature
    weight: int
    inject: Callable[[Cluster, random.Random], Injected | None]

    @property
    def takes_etcd_away(self) -> bool:
        return self.kind in ("kill_etcd", "stop_etcd")

    @property
    def silences_node(self) -> bool:
        """Whether other nodes cannot ask the agent of a node any more."""
        return self.kind in ("kill_agent", "kill_node", "freeze_agent", "cut")


def _expendable(cluster: Cluster, rng: random.Random, *, starting: bool = False) -> Node | None:
    """A node that may go, since another one stays and is well; one that is still `starting` only if so wished."""
    nodes = [node for node in cluster.nodes if not node.may_exit and not node.is_away]
    well = [node for node in nodes if node.has_joined]
    chosen = [node for node in (nodes if starting else well) if any(other is not node for other in well)]
    return rng.choice(chosen) if chosen else None


def _join(cluster: Cluster, rng: random.Random) -> Injected | None:
    if not cluster.free_numbers:
        return None
    node = cluster.join(rng.choice(cluster.free_numbers))
    return Injected(f"{node.address} starts")


def _sigterm(cluster: Cluster, rng: random.Random) -> Injected | None:
    if (node := _expendable(cluster, rng, starting=True)) is None:
        return None
    # Python and torch take a while to start, and one more to enter the job.
    node.may_exit = (0,) if node.has_joined else (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    node.run.send(signal.SIGTERM)
    return Injected(f"SIGTERM to {node.address}")


def _drain(cluster: Cluster, rng: random.Random) -> Injected | None:
    node = _expendable(cluster, rng)
    if node is None or not cluster.etcd_is_there:
        return None
    records = [record for record in cluster.state().nodes if record.address == node.address]
    if len(records) != 1:
        return None
    node.may_exit = (0,)
    cluster.client.put(cluster.keys.drain(records[0].name), "")
    return Injected(f"control/drain/{records[0].name}")


def _scale(cluster: Cluster, rng: random.Random) -> Injected | None:
    if not cluster.etcd_is_there:
        return None
    most = cluster.num_nodes * cluster.num_slots
    # Mostly sizes at which every part of the state has several holders, so that losses are met in place.
    sizes = [*["max"] * (4 * cluster.num_nodes), *map(str, range(1, most + 1))]
    sizes += [f"nodes={n + 1}" for n in range(cluster.num_nodes)]
    configs = ["PP2TP1DP1", "PP1TP1DP2", "PP2TP1DP2", "PP1TP2DP2", "PP1TP1DP3", "PP1TP1DP4", "PP1TP1DP5", "rubbish"]
    size = rng.choice(sizes + configs)
    return Injected(f"control/scale {size}", request=cluster.client.put(cluster.keys.scale, size))


def _kill_worker(cluster: Cluster, rng: random.Random) -> Injected | None:
    if not (pids := cluster.workers()):
        return None
    rank = rng.randrange(len(pids))
    cluster.note_deaths([pids[rank]])
    send(pids[rank], signal.SIGKILL)
    return Injected(f"SIGKILL to the worker of rank {rank}")


def _stop_and_kill_worker(cluster: Cluster, rng: random.Random) -> Injected | None:
    """The others wait for it inside their collectives, and then it is gone."""
    if not (pids := cluster.workers()):
        return None
    rank, hold_s = rng.randrange(len(pids)), rng.uniform(0.3, 3)
    pid = pids[rank]
    cluster.note_deaths([pid])
    send(pid, signal.SIGSTOP)
    return Injected(f"SIGSTOP, then SIGKILL, to the worker of rank {rank}", hold_s, lambda: send(pid, signal.SIGKILL))


def _hang_worker(cluster: Cluster, rng: random.Random) -> Injected | None:
    """For good: it has to be found by lack of progress."""
    if not (pids := cluster.workers()):
        return None
    rank = rng.randrange(len(pids))
    cluster.note_deaths([pids[rank]])
    send(pids[rank], signal.SIGSTOP)
    return Injected(f"SIGSTOP for good to the worker of rank {rank}")


def _pause_worker(cluster: Cluster, rng: random.Random) -> Injected | None:
    if not (pids := cluster.workers()):
        return None
    rank, hold_s = rng.randrange(len(pids)), rng.uniform(0.5, 4)
    pid = pids[rank]
    send(pid, signal.SIGSTOP)
    return Injected(f"SIGSTOP to the worker of rank {rank}", hold_s, lambda: send(pid, signal.SIGCONT))


def _kill_agent(cluster: Cluster, rng: random.Random) -> Injected | None:
    if (node := _expendable(cluster, rng, starting=True)) is None:
        return None
    node.may_exit = (-signal.SIGKILL,)
    cluster.note_deaths(cluster.workers_of(node))
    node.run.send(signal.SIGKILL)
    return Injected(f"SIGKILL to {node.address}")


def _kill_node(cluster: Cluster, rng: random.Random) -> Injected | None:
    """The agent, its guardian and its workers at once, as when a machine loses its power."""
    if (node := _expendable(cluster, rng, starting=True)) is None:
        return None
    node.may_exit = (-signal.SIGKILL,)
    cluster.note_deaths(cluster.workers_of(node))
    for pid in [node.run.process.pid, *node.run.descendants()]:
        send(pid, signal.SIGKILL)
    return Injected(f"SIGKILL to everything on {node.address}")


def _stop_agent(cluster: Cluster, rng: random.Random, hold_s: float) -> Injected | None:
    if (node := _expendable(cluster, rng)) is None:
        return None
    node.is_away = True
    if hold_s > LEASE_S / 2:
        cluster.note_deaths(cluster.workers_of(node))
    node.run.send(signal.SIGSTOP)

    def undo() -> None:
        send(node.run.process.pid, signal.SIGCONT)
        node.is_away = False

    return Injected(f"SIGSTOP to {node.address}", hold_s, undo)


def _pause_agent(cluster: Cluster, rng: random.Random) -> Injected | None:
    return _stop_agent(cluster, rng, rng.uniform(0.3, LEASE_S / 3))


def _freeze_agent(cluster: Cluster, rng: random.Random) -> Injected | None:
    return _stop_agent(cluster, rng, LEASE_S + rng.uniform(2, 8))


def _kill_etcd(cluster: Cluster, rng: random.Random) -> Injected | None:
    if not cluster.etcd_is_there:
        return None
    cluster.etcd_is_there = False
    cluster.etcd.kill()

    def undo() -> None:
        cluster.etcd.start_again()
        cluster.etcd_is_there = True

    return Injected("SIGKILL to etcd", rng.uniform(0.5, 2 * LEASE_S), undo)


def _stop_etcd(cluster: Cluster, rng: random.Random) -> Injected | None:
    if not cluster.etcd_is_there:
        return None
    cluster.etcd_is_there = False
    pid = cluster.etcd.pid
    send(pid, signal.SIGSTOP)

    def undo() -> None:
        send(pid, signal.SIGCONT)
        cluster.etcd_is_there = True

    return Injected("SIGSTOP to etcd", rng.uniform(0.5, 2 * LEASE_S), undo)


def _cut(cluster: Cluster, rng: random.Random, hold_s: float) -> Injected | None:
    node = _expendable(cluster, rng)
    if cluster.network is None or node is None or node.host is None:
        return None
    network, host = cluster.network, node.host
    node.is_away = True
    if hold_s > LEASE_S / 2:
        cluster.note_deaths(cluster.workers_of(node))
    network.cut(host)

    def undo() -> None:
        network.heal(host)
        node.is_away = False

    return Injected(f"{node.address} is cut off", hold_s, undo)


FAULTS = (
    Fault("join", Nature.PLANNED, 14, _join),
    Fault("sigterm", Nature.PLANNED, 3, _sigterm),
    Fault("drain", Nature.PLANNED, 3, _drain),
    Fault("scale", Nature.PLANNED, 5, _scale),
    Fault("pause_worker", Nature.HARMLESS, 1, _pause_worker),
    Fault("pause_agent", Nature.HARMLESS, 1, _pause_agent),
    Fault("kill_etcd", Nature.HARMLESS, 2, _kill_etcd),
    Fault("stop_etcd", Nature.HARMLESS, 2, _stop_etcd),
    Fault("blink", Nature.HARMLESS, 1, lambda cluster, rng: _cut(cluster, rng, rng.uniform(0.2, LEASE_S / 3))),
    Fault("kill_worker", Nature.LOSS, 6, _kill_worker),
    Fault("stop_and_kill_worker", Nature.LOSS, 3, _stop_and_kill_worker),
    Fault("hang_worker", Nature.LOSS, 1, _hang_worker),
    Fault("kill_agent", Nature.LOSS, 4, _kill_agent),
    Fault("kill_node", Nature.LOSS, 3, _kill_node),
    Fault("freeze_agent", Nature.LOSS, 2, _freeze_agent),
    Fault("cut", Nature.LOSS, 3, lambda cluster, rng: _cut(cluster, rng, LEASE_S * rng.uniform(1.5, 4))),
)


def draw(cluster: Cluster, rng: random.Random, kinds: tuple[str, ...]) -> tuple[Fault, Injected]:
    """Do one fault that can be done now."""
    while True:
        chosen = [fault for fault in FAULTS if not kinds or fault.kind in kinds]
        (fault,) = rng.choices(chosen, [fault.weight for fault in chosen])
        if (injected := fault.inject(cluster, rng)) is not None:
            return fault, injected
