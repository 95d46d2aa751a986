"""How fast an administrator's key reaches every agent, and what the agents cost etcd.

Starts a private etcd and, for each size asked for, the control plane of that many agents: each with its own etcd
connection, mirror, membership under a lease and candidacy for the lead. They share a few processes, since it is the
wire that is measured and not Python's start. Ends with one JSON object:

  key_to_agents_ms_median_N  from before the put until the last of N agents has the key in its mirror; median over puts
  key_to_agents_ms_max_N     the same, slowest put
  key_to_one_agent_ms_median_N  until an agent has it; median over puts and agents
  join_s_N                   until all N agents see each other, from nothing
  lead_handover_ms_N         from the leader's resignation until another leads
  etcd_writes_per_agent_per_minute    what goes through etcd's log (raft proposals) while nothing happens; largest N
  etcd_messages_per_agent_per_minute  what etcd receives (lease renewals, watch heartbeats) meanwhile; largest N
  agent_cpu_percent          of one core, per agent, meanwhile; largest N

    python scripts/bench_control.py --agents 64 --agents 256
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
import urllib.request
from itertools import chain
from multiprocessing.connection import Connection

import click
from stand_in_agent import StandInAgent

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.mirror import Mirror
from etc_agent.rendezvous.private.server import EtcdServer

LEASE_TTL_S = 10
SECONDS_BETWEEN_PUTS = 0.3
TIMEOUT_S = 120.0


def watched(endpoint: str, keys: JobKeys, name: str) -> tuple[StandInAgent, dict[str, float]]:
    """An agent, and when (time.monotonic()) each value of control/scale came to it."""
    seen: dict[str, float] = {}

    def note(mirror: Mirror) -> None:
        now, found = time.monotonic(), mirror.snapshot().get(keys.scale)
        if found:
            seen.setdefault(found.text, now)

    value = json.dumps({"node": name})
    return StandInAgent.start(endpoint, keys, name, value, ttl_s=LEASE_TTL_S, timeout_s=30.0, on_change=note), seen


def host_agents(endpoint: str, keys: JobKeys, names: list[str], num_all: int, pipe: Connection) -> None:
    """One process with some of the agents. Answers what comes through `pipe`, until "stop"."""
    made = [watched(endpoint, keys, name) for name in names]
    agents = [agent for agent, _ in made]
    for agent in agents:
        agent.mirror.wait_for(lambda seen: len(seen.under(keys.nodes_prefix)) == num_all and keys.leader in seen, None)
    pipe.send("ready")
    while (question := pipe.recv()) != "stop":
        if question == "seen":
            pipe.send([seen for _, seen in made])
        elif question == "cpu":
            pipe.send(time.process_time())
        elif question == "resign":
            leaders = [agent for agent in agents if agent.election.is_leader]
            begin = time.monotonic()
            for leader in leaders:
                leader.election.resign()
            pipe.send(begin if leaders else None)
    for agent in agents:
        agent.stop()


class Hosts:
    """The processes that host the agents."""

    def __init__(self, endpoint: str, keys: JobKeys, num_agents: int, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        names = [f"n{index}" for index in range(num_agents)]
        self._pipes: list[Connection] = []
        self._processes = []
        for index in range(num_processes):
            ours, theirs = context.Pipe()
            arguments = (endpoint, keys, names[index::num_processes], num_agents, theirs)
            process = context.Process(target=host_agents, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            self._receive(pipe)

    def ask(self, question: str) -> list:
        for pipe in self._pipes:
            pipe.send(question)
        return [self._receive(pipe) for pipe in self._pipes]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send("stop")
        for process in self._processes:
            process.join(TIMEOUT_S)

    def _receive(self, pipe: Connection) -> object:
        if not pipe.poll(TIMEOUT_S):
            raise click.ClickException(f"the agents did not get ready or did not answer within {TIMEOUT_S:.0f} s")
        try:
            return pipe.recv()
        except EOFError:
            raise click.ClickException("a process of the agents has died; see its error above") from None


def etcd_counters(endpoint: str) -> tuple[float, float]:
    """What etcd's own metrics say: (proposals committed, messages received)."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    value = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}
    received = sum(number for name, number in value.items() if name.startswith("grpc_server_msg_received_total"))
    return value["etcd_server_proposals_committed_total"], received


def measure(server: EtcdServer, num_agents: int, num_puts: int, num_processes: int, idle_s: float) -> dict[str, float]:
    """One size, on its own run id."""
    keys = JobKeys(f"bench{num_agents}")
    begin = time.monotonic()
    hosts = Hosts(server.endpoint, keys, num_agents, min(num_processes, num_agents))
    join_s = time.monotonic() - begin
    with EtcdClient([server.endpoint]) as client:
        put_at: dict[str, float] = {}
        for number in range(num_puts):
            put_at[f"{number}"] = time.monotonic()
            client.put(keys.scale, f"{number}")
            time.sleep(SECONDS_BETWEEN_PUTS)
        seen = [agent for agents in hosts.ask("seen") for agent in agents]
        # An agent that was given several puts at once has seen only the last of them.
        first = [[agent[number] - at for agent in seen if number in agent] for number, at in put_at.items()]
        complete = [delays for delays in first if len(delays) == num_agents]

        proposals, messages = etcd_counters(server.endpoint)
        cpu_s, idle_begin = sum(hosts.ask("cpu")), time.monotonic()
        time.sleep(idle_s)
        proposals_after, messages_after = etcd_counters(server.endpoint)
        minutes = (time.monotonic() - idle_begin) / 60
        cpu_s = sum(hosts.ask("cpu")) - cpu_s

        leader = client.get(keys.leader)
        resigned_at = next(begin for begin in hosts.ask("resign") if begin is not None)
        while (successor := client.get(keys.leader)) is None or successor == leader:
            time.sleep(0.001)
        handover_s = time.monotonic() - resigned_at
        hosts.stop()
        client.delete_prefix(keys.root)
    if not complete:
        raise click.ClickException("no key reached every agent before the next was put; this machine is too busy")
    return {
        f"key_to_agents_ms_median_{num_agents}": round(1000 * statistics.median(map(max, complete)), 1),
        f"key_to_agents_ms_max_{num_agents}": round(1000 * max(map(max, complete)), 1),
        f"key_to_one_agent_ms_median_{num_agents}": round(1000 * statistics.median(chain.from_iterable(complete)), 1),
        f"join_s_{num_agents}": round(join_s, 1),
        f"lead_handover_ms_{num_agents}": round(1000 * handover_s, 1),
        "etcd_writes_per_agent_per_minute": round((proposals_after - proposals) / num_agents / minutes, 2),
        "etcd_messages_per_agent_per_minute": round((messages_after - messages) / num_agents / minutes, 1),
        "agent_cpu_percent": round(cpu_s / num_agents / minutes / 60 * 100, 2),
    }


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--agents", "sizes", type=click.IntRange(1), multiple=True, default=(64, 256), show_default=True)
@click.option("--puts", type=click.IntRange(1), default=30, show_default=True, help="Keys put per size.")
@click.option("--processes", type=click.IntRange(1), default=8, show_default=True, help="That share the agents.")
@click.option("--idle", type=click.FloatRange(1), default=30.0, show_default=True, help="Seconds to count etcd's work.")
def main(sizes: tuple[int, ...], puts: int, processes: int, idle: float) -> None:
    results: dict[str, float] = {}
    with EtcdServer() as server:
        for size in sorted(sizes):
            found = measure(server, size, puts, processes, idle)
            results |= found
            click.echo(f"{size} agents:")
            for name, value in found.items():
                click.echo(f"  {name.removesuffix(f'_{size}'):<36} {value:g}")
    click.echo(json.dumps(results))


if __name__ == "__main__":
    main()
