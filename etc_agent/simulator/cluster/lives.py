"""Random lives of a job on a simulated cluster: faults of every kind, then a quiet time, and what must hold throughout.

During the faults: no two generations train at once (`World`). After them: every request has its answer, and the job has
ended or trains on exactly its workers and in the size that was asked for, so that no config is excluded for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from etc_agent.control.causes import ErrorKind
from etc_agent.parallel.config import ParallelConfig
from etc_agent.planner.choose import NoConfigError
from etc_agent.reconfig.known.records import FailureKind, Result
from etc_agent.reconfig.known.view import View
from etc_agent.reconfig.sizes.sizing import NotDescribed, meeting
from etc_agent.reconfig.sizes.wanted import parse_wanted
from etc_agent.simulator.cluster.workers import Model
from etc_agent.simulator.cluster.world import ETCD, World

NAMES = ("a", "b", "c", "d")
SIZES = ("1", "2", "3", "4", "6", "8", "nodes=1", "nodes=2", "PP2TP1DP1", "PP3TP2", "max", "x")
PEACE_S = 120.0


class BrokenPromise(AssertionError):
    """A property that must hold after the quiet time does not."""


class Life:
    """One random life, from the numbers of `random`; `story` has one line for each event."""

    def __init__(self, world: World, random: Random, num_nodes: int = 2) -> None:
        self.world, self.random = world, random
        self.story: list[str] = []
        for name in NAMES[:num_nodes]:
            self._tell(f"{name} joins")
            world.join(name)
        world.run(random.choice((2.0, 20.0)))

    def trouble(self, num_events: int) -> None:
        """That many events, with time between them."""
        for _ in range(num_events):
            if self.world.is_over:
                return
            self.random.choice(self._events())()
            self.world.run(self.random.choice((0.25, 0.5, 1.0, 2.0, 4.0, 9.0, 15.0)))

    def peace(self) -> None:
        """Mend everything, let time pass, then check the properties.

        Raises:
            BrokenPromise: one does not hold.
        """
        world = self.world
        self._tell("peace")
        world.heal()
        if not world.etcd.is_up:
            world.etcd.start_again(world.now)
        if world.etcd.records.paused:
            world.etcd.change(paused=False)
        world.model.refusing, world.model.votes_down, world.model.is_slow = "", "", False
        world.torn_after = None
        for agent in world.agents.values():
            agent.is_frozen, agent.renewal_s = False, 0.0
            for worker in agent.workers.values():
                worker.prepare(world.model)
        world.run(PEACE_S)
        try:
            check(world)
        except BrokenPromise as broken:
            raise BrokenPromise("\n".join([str(broken), *self.story, str(world.etcd.records.current)])) from None

    # ---- what can happen --------------------------------------------------------------------------------------

    def _events(self) -> list[Callable[[], None]]:
        return [
            self._a_node_joins, self._a_host_dies, self._a_node_drains, self._a_size_is_asked_for,
            self._two_nodes_are_split, self._two_nodes_are_split, self._a_node_loses_etcd, self._a_node_loses_etcd,
            self._a_node_loses_etcd, self._the_network_is_mended, self._an_agent_freezes_or_goes_on,
            self._etcd_goes_or_comes, self._renewals_become_slow, self._workers_change_their_mind,
            self._a_worker_fails, self._a_worker_dies, self._a_worker_dies, self._a_worker_exits,
            self._a_connection_breaks,
            self._votes_are_torn_or_whole,
            self._the_job_is_paused_or_goes_on,
        ]

    def _tell(self, what: str) -> None:
        self.story.append(f"{self.world.now:7.2f} {what}")

    def _node(self) -> str:
        return self.random.choice(sorted(self.world.agents) or ["nobody"])

    def _a_node_joins(self) -> None:
        """Only if some node of the job hears etcd: see docs/liveness.md, "What remains"."""
        world, name = self.world, self.random.choice(NAMES)
        if name in world.agents or not world.etcd.is_up:
            return
        if any(agent.contact.since is not None and not agent.is_frozen for agent in world.agents.values()):
            self._tell(f"{name} joins")
            world.join(name)

    def _a_host_dies(self) -> None:
        name = self._node()
        if len(self.world.agents) > 1:
            self._tell(f"the host of {name} dies")
            self.world.die(name)

    def _a_node_drains(self) -> None:
        name = self._node()
        if len(self.world.agents) > 2:
            self._tell(f"{name} drains")
            self.world.agents[name].drain()

    def _a_size_is_asked_for(self) -> None:
        size = self.random.choice(SIZES)
        self._tell(f"{size} is asked for")
        self.world.etcd.ask(size)

    def _two_nodes_are_split(self) -> None:
        one, other = self.random.sample(NAMES, 2)
        pairs = {(one, other)} if self.random.random() < 0.3 else {(one, other), (other, one)}
        self._tell(f"cut {sorted(pairs)}")
        self.world.cut |= pairs

    def _a_node_loses_etcd(self) -> None:
        name = self.random.choice(NAMES)
        self._tell(f"cut {name} from etcd")
        self.world.split(name, ETCD)

    def _the_network_is_mended(self) -> None:
        if self.random.random() < 0.3:
            self._tell("the network is whole")
            self.world.heal()
        elif self.world.cut:
            one, other = self.random.choice(sorted(self.world.cut))
            self._tell(f"mend {one} {other}")
            self.world.cut -= {(one, other), (other, one)}

    def _an_agent_freezes_or_goes_on(self) -> None:
        name = self._node()
        if name in self.world.agents:
            agent = self.world.agents[name]
            agent.is_frozen = not agent.is_frozen
            self._tell(f"the agent of {name} {'freezes' if agent.is_frozen else 'goes on'}")

    def _etcd_goes_or_comes(self) -> None:
        etcd = self.world.etcd
        self._tell("etcd goes" if etcd.is_up else "etcd comes back")
        if etcd.is_up:
            etcd.is_up = False
        else:
            etcd.start_again(self.world.now)

    def _renewals_become_slow(self) -> None:
        name = self._node()
        if name in self.world.agents:
            seconds = self.random.choice((0.0, 1.0, 2.5, 4.0))
            self._tell(f"renewals of {name} take {seconds} s")
            self.world.agents[name].renewal_s = seconds

    def _a_worker_fails(self) -> None:
        if running := sorted(self.world.running()):
            name, index = self.random.choice(running)
            kind = self.random.choice([kind for kind in FailureKind if not kind.is_hang])
            self._tell(f"worker {name}/{index} fails: {kind}")
            self.world.agents[name].fail(index, kind)

    def _a_worker_dies(self) -> None:
        """It is killed in the midst of a vote, which some of the others see succeed."""
        world, running = self.world, sorted(self.world.running())
        if not running:
            return
        name, index = self.random.choice(running)
        dead = world.agents[name].workers[index]
        self._tell(f"worker {name}/{index} is killed")
        world.agents[name].fail(index, FailureKind.KILLED)
        for agent in world.agents.values():
            for worker in agent.workers.values():
                is_peer = worker.is_running and not worker.is_latched and worker.generation == dead.generation > 0
                if is_peer and worker.view.in_session and self.random.random() < 0.3:
                    worker.step = dead.step + 1

    def _a_worker_exits(self) -> None:
        """With code 0, out of its session."""
        if self.world.model.in_session and (running := sorted(self.world.running())):
            name, index = self.random.choice(running)
            self._tell(f"worker {name}/{index} exits with code 0")
            self.world.agents[name].workers[index].end(0)

    def _a_connection_breaks(self) -> None:
        """Between two workers of the committed generation that both live."""
        current = self.world.etcd.records.current
        if current.committed and self.world.model.in_session:
            self._tell(f"a connection of generation {current.committed} breaks")
            self.world.broken.add(current.committed)

    def _votes_are_torn_or_whole(self) -> None:
        """From now on only some workers see the vote of a change succeed."""
        self.world.torn_after = self.random.choice((None, None, 1, 2))
        self._tell(f"votes are seen by {self.world.torn_after or 'all'}")

    def _workers_change_their_mind(self) -> None:
        model = self.world.model
        model.refusing, model.is_slow, model.votes_down, model.kind = self.random.choice([
            ("", False, "", ErrorKind.RAISED),
            ("", False, "", ErrorKind.RAISED),
            ("no memory", False, "", ErrorKind.RAISED),
            ("", True, "", ErrorKind.RAISED),
            ("", False, "a peer was lost", ErrorKind.PEER_LOST),
        ])
        self._tell(f"workers: refusing {model.refusing!r}, slow {model.is_slow}, votes down {model.votes_down!r}")
        for agent in self.world.agents.values():
            for worker in agent.workers.values():
                worker.prepare(model)

    def _the_job_is_paused_or_goes_on(self) -> None:
        paused = not self.world.etcd.records.paused
        self._tell("paused" if paused else "goes on")
        self.world.etcd.change(paused=paused)


def check(world: World) -> None:
    """Check the properties of a cluster after a quiet time.

    Raises:
        BrokenPromise: it is not.
    """
    records = world.etcd.records
    leader = world.agents.get(records.leader)
    if world.is_over or leader is None:
        _promise(world.is_over or not world.agents, "nobody leads")
        return
    view = leader.view()
    wanted = _meeting(view, world.model)
    if records.scale is not None:
        answers = [reply for reply in world.etcd.replies if reply.revision == records.scale.revision]
        _promise(bool(answers), f"no answer to {records.scale.text!r}")
        is_final = answers[-1].result not in (Result.ACCEPTED, Result.PENDING)
        _promise(is_final or wanted is None or view.is_below_min, "a request stays open")
    if not view.is_below_min:
        _promise(world.trains(), "a job that can train does not")
        is_it = wanted in (None, world.committed.config)
        _promise(is_it, f"it trains as {world.committed.config}, and {wanted} is wanted and possible")


def _promise(is_kept: bool, what: str) -> None:
    if not is_kept:
        raise BrokenPromise(what)


def _meeting(view: View, model: Model) -> ParallelConfig | None:
    """The config of the wanted size on the present nodes, whatever has failed before; None if the nodes do not
    suffice."""
    impossible = {ParallelConfig.parse(config): why for config, why in model.impossible.items()}
    fresh = replace(
        view,
        current=replace(view.current, given_up=()),
        descriptions={**view.descriptions, **impossible},
    )
    try:
        return meeting(fresh, parse_wanted(view.current.wanted), view.num_usable_slots)
    except (NoConfigError, NotDescribed):
        return None
