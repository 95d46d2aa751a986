"""history: what has happened to a job, a line a generation. It does not write."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from etc_agent.reconfig.known.records import History
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from launcher.ctl.exits import CtlError, Exit
from launcher.ctl.job.jobs import read_history
from launcher.ctl.options import output_option, with_job
from launcher.ctl.show.output import Output
from launcher.ctl.show.tables import history_table
from launcher.ctl.show.times import Since


@click.command()
@with_job
@click.option("--since", type=Since(), metavar="TIME", help="Only what came later: 10m, 2h, 3d, or a date.")
@click.option("--outcome", type=click.Choice(["committed", "withdrawn"]), help="Only changes that ended so.")
@click.option("--grep", metavar="REGEX", help="Only where the reason, or why it was withdrawn, matches.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N of them.")
@output_option
def history(
    client: EtcdClient, keys: JobKeys, since: float | None, outcome: str | None, grep: str | None, last: int | None,
    output: Output,
) -> None:
    """What has happened: one line per generation.

    Each with what it moved, and how long training stood still.

    \b
    etc-ctl history --run-id my-job
    etc-ctl history --since 2h --outcome withdrawn
    etc-ctl history --grep 'was lost' -o json | jq .stop_ms
    """
    pattern = _pattern(grep)
    records = [
        record for record in read_history(client, keys)
        if (since is None or record.time >= since) and outcome in (None, record.outcome)
        and (pattern is None or pattern.search(f"{record.reason}\n{record.why}"))
    ]
    chosen: Sequence[History] = records if last is None else records[-last:]
    output.show_all(chosen, lambda: history_table(chosen) if chosen else "nothing that matches has happened")


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return None if grep is None else re.compile(grep)
    except re.error as error:
        raise CtlError(Exit.MISTAKE, f"--grep: {grep!r} is not a regular expression: {error}") from None
