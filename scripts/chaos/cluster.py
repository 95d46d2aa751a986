"""The job under torment, seen from outside: its agents as processes, its etcd, and what both say of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from chaos.lineage import Account
from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.records import Current, History, NodeRecord, Reply
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.listen import OnPort
from etc_agent.rendezvous.private.server import EtcdServer
from tests.scenarios.network import Host, Network
from tests.scenarios.running import EtcRun

GLOBAL_BATCH = 12
LEASE_S = 4.0
_RUN_ID = "chaos"
_JOB = Path(__file__).with_name("job.py")
_CONFIG = """
max_restarts: 1000000
alike_failures: 0
failures: {{max_per_window: 0}}
redundancy: {redundancy}
timeouts: {{lease_s: {lease_s}, join_s: 120, prepare_s: 60, switch_s: 60, drain_s: 60, shutdown_grace_s: 5, hang_s: 12}}
"""


@dataclass(slots=True, eq=False)
class Node:
    """One agent's process. `may_exit`: the codes with which it may end now; none while it should live. `is_away`: it is
    frozen or cut off at the moment."""

    number: int
    address: str
    run: EtcRun
    host: Host | None = None
    may_exit: tuple[int, ...] = ()
    is_away: bool = False

    @property
    def has_joined(self) -> bool:
        """It has found its place in the job, and says so."""
        return " is in generation " in self.run.output


@dataclass(frozen=True, slots=True)
class State:
    """The job's records at one moment. `withdrawn`: why, for each generation that was proposed in vain."""

    current: Current
    generations: dict[int, Generation]
    nodes: tuple[NodeRecord, ...]
    reply: Reply | None
    withdrawn: dict[int, str]

    @property
    def committed(self) -> Generation | None:
        return self.generations.get(self.current.committed)


class Cluster:
    """Up to `num_nodes` agents of one job over one etcd, on loopback addresses or on hosts of their own (`on_network`).

    `copies_every`: steps between two copy sets of the state in the memory of other nodes, 0 for none. Everything is
    ended and removed at the end of `with`.
    """

    def __init__(
        self, folder: Path, num_nodes: int, num_slots: int, *, on_network: bool, pause_s: float, copies_every: int = 0
    ) -> None:
        self.num_nodes, self.num_slots = num_nodes, num_slots
        self.folder = folder
        self.keys = JobKeys(_RUN_ID)
        self.account = Account(folder)
        self.generations: dict[int, Generation] = {}
        self.withdrawn: dict[int, str] = {}
        self.deaths: dict[int, float] = {}
        self.nodes: list[Node] = []
        self.gone: list[Node] = []
        self._pause_s = pause_s
        self._stack = ExitStack()
        self._config = folder / "job.yaml"
        scheme = f"{{scheme: peer, every: {copies_every}}}" if copies_every else "none"
        self._config.write_text(_CONFIG.format(lease_s=LEASE_S, redundancy=scheme))
        self._stack.callback(self._end_nodes)
        try:
            self.network = self._stack.enter_context(Network(num_nodes)) if on_network else None
            host = self.network.gateway if self.network else "127.0.0.1"
            self.etcd = self._stack.enter_context(EtcdServer(listen=OnPort(host)))
            self.etcd_is_there = True
            self.client = self._stack.enter_context(EtcdClient([self.etcd.endpoint], timeout_s=30.0))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- nodes ----------------------------------------------------------------------------------------------------

    @property
    def free_numbers(self) -> list[int]:
        taken = {node.number for node in self.nodes}
        return [number for number in range(self.num_nodes) if number not in taken]

    def join(self, number: int) -> Node:
        """Start the agent of node `number`."""
        host = self.network.hosts[number] if self.network else None
        address = host.address if host else f"127.0.0.{number + 2}"
        run = EtcRun(
            "--config", self._config, "--nnodes", f"1:{self.num_nodes}", "--nproc-per-node", self.num_slots,
            "--rdzv-id", _RUN_ID, "--etcd-endpoints", self.etcd.endpoint, "--local-addr", address,
            _JOB, self.folder, GLOBAL_BATCH, self._pause_s,
            cwd=self.folder, prefix=host.prefix if host else (),
        )
        node = Node(number, address, run, host)
        self.nodes.append(node)
        return node

    def ended(self) -> Iterator[tuple[Node, int]]:
        """The nodes whose agent has ended since the last call, and their exit codes."""
        for node in list(self.nodes):
            code = node.run.process.poll()
            if code is not None:
                self.nodes.remove(node)
                self.gone.append(node)
                yield node, code

    def orphans(self, timeout_s: float = 15.0) -> dict[int, str]:
        """pid -> command of what agents that are gone have left running, after some time to end."""
        deadline = time.monotonic() + timeout_s
        while left := {pid: what for node in self.gone for pid, what in node.run.descendants().items()}:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.2)
        return {}

    def _end_nodes(self) -> None:
        for node in self.nodes + self.gone:
            node.run.kill()

    # ---- records --------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """What etcd says now.

        Raises:
            EtcdError: it does not answer.
        """
        keys = self.keys
        found = {entry.key: entry for entry in self.client.get_prefix(keys.root)[0]}
        for key, entry in found.items():
            if key.startswith(keys.generations_prefix):
                generation = Generation.from_json(entry.json())
                self.generations[generation.id] = generation
            elif key.startswith(keys.history_prefix):
                history = History.from_json(entry.json())
                if history.outcome == "withdrawn":
                    self.withdrawn[history.generation] = history.why
        current, reply = found.get(keys.current), found.get(keys.reply)
        nodes = (NodeRecord.from_json(found[key].json()) for key in found if key.startswith(keys.nodes_prefix))
        return State(
            Current.from_json(current.json()) if current else Current(), dict(self.generations), tuple(nodes),
            Reply.from_json(reply.json()) if reply else None, dict(self.withdrawn),
        )

    def workers_of(self, node: Node) -> list[int]:
        """The pids of its processes that have trained."""
        known = {line.pid for line in self.account.read()}
        return [pid for pid in node.run.descendants() if pid in known]

    def note_deaths(self, pids: Iterable[int]) -> None:
        """These workers are killed now, or made to hang until somebody kills them."""
        self.deaths |= {pid: time.time() for pid in pids if pid not in self.deaths}

    def workers(self) -> list[int]:
        """The pids of the workers that trained last, in order of rank."""
        lines = self.account.read()
        newest = max((line.generation for line in lines), default=0)
        pids = {line.rank: line.pid for line in lines if line.generation == newest}
        return [pids[rank] for rank in sorted(pids)]


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process; one that is gone is left alone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
