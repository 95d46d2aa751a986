"""list, status, explain: what jobs do now. None of them writes."""

from __future__ import annotations

import time

import click

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from launcher.ctl.job.explaining import explain as explanation
from launcher.ctl.job.facts import list_row, status_of
from launcher.ctl.job.finding import run_ids
from launcher.ctl.job.jobs import State, read_job, read_jobs
from launcher.ctl.options import output_option, with_etcd, with_job
from launcher.ctl.show.output import Output
from launcher.ctl.show.screens import list_screen, status_screen


@click.command("list")
@with_etcd
@click.option("--state", "states", multiple=True, type=click.Choice([state.value for state in State]),
              help="Only jobs in this state; may be repeated.")
@output_option
def list_jobs(client: EtcdClient, prefix: str, states: tuple[str, ...], output: Output) -> None:
    """Every job under the prefix.

    \b
    etc-ctl list
    etc-ctl list --state running --state changing
    etc-ctl list -o json | jq -r 'select(.state == "failed").run_id'
    """
    keys = [JobKeys(run_id, prefix) for run_id in run_ids(client, prefix)]
    rows = [list_row(job) for job in read_jobs(client, keys)]
    shown = [row for row in rows if not states or row["state"] in states]
    none = f"no jobs under {prefix}" + (f" are {' or '.join(states)}; there are {len(rows)} others" if rows else "")
    output.show_all(shown, lambda: list_screen(shown, time.time()) if shown else none)


@click.command()
@with_job
@output_option
def status(client: EtcdClient, keys: JobKeys, output: Output) -> None:
    """What the job does now, on one screen.

    \b
    etc-ctl status --run-id my-job
    watch etc-ctl status
    etc-ctl status -o json | jq .step
    """
    fields = status_of(read_job(client, keys))
    output.show(fields, lambda: status_screen(fields, time.time()))


@click.command()
@with_job
@output_option
def explain(client: EtcdClient, keys: JobKeys, output: Output) -> None:
    """What the leader waits for now, in one sentence.

    \b
    etc-ctl explain --run-id my-job
    """
    job = read_job(client, keys)
    sentence = explanation(job)
    output.show({"run_id": job.run_id, "state": job.state, "explanation": sentence}, lambda: sentence)
