"""How long etc-ctl takes where one etcd has many jobs, and one job many nodes. Made-up records in a private etcd.

    python scripts/bench_ctl.py --jobs 500 --nodes 1000 --generations 30

One JSON object: seconds and requests of each command, in a process that is already there, and of the whole program.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest import mock

import click

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.transport import Transport
from etc_agent.rendezvous.etcd.values import Put
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.server import EtcdServer
from launcher.ctl.main import run


def records(run_id: str, num_nodes: int, num_generations: int) -> Iterator[Put]:
    """What a job has in etcd: nodes of 8 slots, a config over all of them, and a past."""
    keys, slots = JobKeys(run_id), num_nodes * 8
    yield Put(keys.job, json.dumps({"incarnation": "x", "nnodes": f"1:{num_nodes}", "started": 1.7e9}))
    yield Put(keys.leader, "node0")
    yield Put(keys.current, json.dumps({"committed": num_generations, "next_id": num_generations + 1}))
    status = {"generation": num_generations, "config": f"DP{slots}", "step": 7, "num_steps": 100, "workers": slots}
    yield Put(keys.status, json.dumps(status))
    placement = [f"node{rank // 8}/{rank % 8}" for rank in range(slots)]
    for index in range(num_nodes):
        name = f"node{index}"
        node = {"name": name, "address": "10.0.0.1", "num_slots": 8, "store_port": 1, "instance": "i"}
        yield Put(keys.node(name), json.dumps(node))
        ack = {"generation": num_generations, "node": name, "in_session": True, "contact": "10.0.0.1:1"}
        yield Put(keys.ack(num_generations, name), json.dumps(ack))
    for id_ in range(1, num_generations + 1):
        fields = {"config": f"DP{slots}", "previous": id_ - 1, "reason": "made up"}
        generation = {**fields, "id": id_, "placement": placement, "store": "s:1"}
        yield Put(keys.generation(id_), json.dumps(generation))
        yield Put(keys.history(id_), json.dumps({**fields, "generation": id_, "outcome": "committed"}))


def fill(client: EtcdClient, num_jobs: int, num_nodes: int, num_generations: int) -> None:
    """`num_jobs` jobs of two nodes and one generation, and one of `num_nodes` with a past."""
    puts = [put for number in range(num_jobs - 1) for put in records(f"job{number:04d}", 2, 1)]
    puts += records("large", num_nodes, num_generations)
    for start in range(0, len(puts), 8):  # a generation of 1,000 nodes is 120 kB, and etcd takes 1.5 MB at once
        client.transact([], puts[start : start + 8])


def measured(*arguments: str) -> dict[str, float]:
    """Seconds, requests to etcd and bytes of its answers for one command in this process."""
    requests, num_bytes = 0, 0
    call = Transport.call

    def counted(self: Transport, *args: object, **named: object) -> object:
        nonlocal requests, num_bytes
        answer = call(self, *args, **named)  # type: ignore[arg-type]
        requests, num_bytes = requests + 1, num_bytes + answer.ByteSize()
        return answer

    with mock.patch.object(Transport, "call", counted), contextlib.redirect_stdout(io.StringIO()):
        began = time.perf_counter()
        code = run(arguments)
        seconds = time.perf_counter() - began
    assert code == 0, arguments
    return {"seconds": round(seconds, 3), "requests": requests, "answer_bytes": num_bytes}


@click.command()
@click.option("--jobs", default=500, show_default=True)
@click.option("--nodes", default=1000, show_default=True, help="Of the largest job.")
@click.option("--generations", default=30, show_default=True, help="Of the largest job.")
def main(jobs: int, nodes: int, generations: int) -> None:
    """Measure `list` over all jobs, and `status` and `history` of the largest."""
    with EtcdServer() as server, EtcdClient([server.endpoint]) as client:
        fill(client, jobs, nodes, generations)
        at = ("--etcd-endpoints", server.endpoint)
        large = (*at, "--run-id", "large")
        result: dict[str, object] = {
            "list": measured("list", *at), "list as JSON": measured("list", "-o", "json", *at),
            "status": measured("status", *large), "history": measured("history", *large),
        }
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "launcher.ctl", "list", *at], stdout=subprocess.DEVNULL, check=True)
        result["whole program list"] = {"seconds": round(time.perf_counter() - began, 3)}
    click.echo(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
