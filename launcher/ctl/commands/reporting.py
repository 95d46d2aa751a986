"""report: a job's life as one HTML page. It does not write to etcd."""

from __future__ import annotations

import time
from pathlib import Path

import click

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from launcher.ctl.exits import CtlError, Exit
from launcher.ctl.job.jobs import read_generations, read_history, read_job
from launcher.ctl.options import output_option_in_full, with_job
from launcher.ctl.show.output import Output


@click.command()
@with_job
@click.option("-o", "--file", "file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="The page.  [default: report-RUN_ID.html]")
@click.option("--events", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
              help="Events that etc-run --events has written, of one node or, repeated, of several.")
@output_option_in_full
def report(
    client: EtcdClient, keys: JobKeys, file: Path | None, events: tuple[Path, ...], output: Output
) -> None:
    """A job's life as one HTML page that stands alone.

    Timeline of configs and stop times, goodput, bytes moved, failures, nodes coming and going.

    \b
    etc-ctl report --run-id my-job -o report.html
    etc-ctl report -o report.html --events events-a.jsonl --events events-b.jsonl
    """
    from launcher.ctl.report.life import life_of, read_events
    from launcher.ctl.report.page import page_of  # loads jinja2

    job, now = read_job(client, keys), time.time()
    told = read_events(events, job.run_id)
    life = life_of(job, read_history(client, keys), read_generations(client, keys), told, now)
    path = file or Path(f"report-{job.run_id}.html")
    try:
        path.write_text(page_of(life, now), encoding="utf-8")
    except OSError as error:
        raise CtlError(Exit.MISTAKE, f"{path} cannot be written: {error.strerror}") from None
    facts = {
        "file": str(path), "generations": len(life.eras), "failures": len(life.failures), "goodput": life.goodput,
        "moved_bytes": life.account.moved_bytes, "stopped_s": life.stopped_s,
    }
    output.show(facts, lambda: f"{path}: {len(life.eras)} generations, {len(life.failures)} failures")
