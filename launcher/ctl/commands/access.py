"""role: the etcd permissions that a job's agents and administrators need. It asks no etcd."""

from __future__ import annotations

import click

from etc_agent.rendezvous.keys import DEFAULT_PREFIX, JobKeys
from launcher.ctl.contexts import read_contexts
from launcher.ctl.exits import CtlError, Exit
from launcher.ctl.options import output_option
from launcher.ctl.roles import AUDIENCES, role_for
from launcher.ctl.show.output import Output


@click.command()
@click.option("--run-id", envvar="ETC_RUN_ID", metavar="NAME", help="The job; it need not exist yet.  [ETC_RUN_ID]")
@click.option("--etcd-prefix", envvar="ETC_PREFIX", metavar="/PREFIX",
              help=f"[ETC_PREFIX; default: {DEFAULT_PREFIX}]")
@click.option("--context", envvar="ETC_CONTEXT", metavar="NAME", help="Prefix and job by name.  [ETC_CONTEXT]")
@click.option("--for", "audiences", multiple=True, type=click.Choice(AUDIENCES),
              help="agent: etc-run on the nodes. admin: etc-ctl. viewer: only looks.  [default: all three]")
@click.option("--print", "is_printed", is_flag=True, default=True, hidden=True)
@output_option
def role(
    run_id: str | None, etcd_prefix: str | None, context: str | None, audiences: tuple[str, ...], is_printed: bool,
    output: Output,
) -> None:
    """The least etcd permissions of one job, as etcdctl commands.

    Nothing is asked of etcd or changed there. --output json prints a role a line, with etcd's own field names.

    \b
    etc-ctl role --run-id my-job --print
    etc-ctl role --run-id my-job --for agent | sh
    etcdctl user add node && etcdctl user grant-role node etc-run.etc-run.my-job.agent
    """
    values = read_contexts().choose(context).values
    chosen = run_id or values.get("run_id")
    if chosen is None:
        raise CtlError(Exit.MISTAKE, "--run-id: the role of which job? give its name; it need not exist yet")
    keys = JobKeys(chosen, etcd_prefix or values.get("etcd_prefix", DEFAULT_PREFIX))
    roles = [role_for(audience, keys) for audience in audiences or AUDIENCES]
    output.show_all(roles, lambda: "\n".join(line for each in roles for line in each.commands()))
