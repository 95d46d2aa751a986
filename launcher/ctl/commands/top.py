"""top: a job live: rate, steps node by node, phase, and a bar while a change is prepared. It does not write."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from launcher.ctl.job.agents import ask_agents
from launcher.ctl.job.facts import status_of
from launcher.ctl.job.jobs import read_job
from launcher.ctl.options import output_option, with_job
from launcher.ctl.show.output import Output
from launcher.ctl.show.tables import console
from launcher.ctl.show.top_screen import top_screen

_AGENT_S = 1.0


@click.command()
@with_job
@click.option("--every", "every_s", type=click.FloatRange(min=0.2), default=1.0, show_default=True, metavar="SECONDS",
              help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once.")
@output_option
def top(client: EtcdClient, keys: JobKeys, every_s: float, once: bool, output: Output) -> None:
    """A job, live, until it ends or Ctrl-C.

    Each look is two small requests to etcd, and a question to each node's agent for its step: a node that this host
    cannot connect to shows none.

    \b
    etc-ctl top --run-id my-job
    etc-ctl top --every 5
    etc-ctl top --once -o json | jq '.nodes[].step'
    """
    looks = _looks(client, keys, every_s, once)
    if output.form == "json" or once or not sys.stdout.isatty():
        for look in looks:
            output.show(look, lambda look=look: top_screen(look, time.time()))  # type: ignore[misc]
        return
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        for look in looks:
            live.update(top_screen(look, time.time()), refresh=True)


def _looks(client: EtcdClient, keys: JobKeys, every_s: float, once: bool) -> Iterator[dict[str, Any]]:
    """What there is to see, again and again; the last one is of a job that has ended."""
    for number in itertools.count():
        if number:
            time.sleep(every_s)
        job = read_job(client, keys)
        agents = {} if job.state.has_ended else ask_agents(job.records.incarnation, job.nodes, _AGENT_S)
        status = status_of(job)
        for node in status["nodes"]:
            said = agents.get(node["name"])
            node["step"] = said.step if said is not None else None
            node["answers"] = said is not None
            node["follows_etcd_s"] = round(said.followed_s, 1) if said is not None else None
        yield status
        if once or job.state.has_ended:
            return
