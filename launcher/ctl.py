"""etc-ctl: look at a running job, and ask it to change. It reads and writes the keys that ``etcdctl`` would."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from etc_agent.agent.etcd import connect
from etc_agent.agent.settings import EtcdSettings
from etc_agent.errors import EtcError
from etc_agent.reconfig.records import History, NodeRecord, Reply, Result
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.mirror import Snapshot
from etc_agent.version import version
from launcher import admin
from launcher.etcd_options import check_readable, parse_endpoints, read_password
from launcher.tables import console, history_table, status_table, when

ANSWER_S = 15.0
WAIT_S = 600.0

_EXIT_CODES = {Result.REFUSED: 1, Result.RESTARTED: 3}
"""What `scale` ends with; 0 for every other answer, or none yet."""

_ETCD_OPTIONS = (
    click.option(
        "--etcd-endpoints", envvar="ETC_ENDPOINTS", metavar="HOST:PORT,...", default="127.0.0.1:2379",
        show_default=True, help="etcd v3 servers; https://HOST:PORT for TLS. [ETC_ENDPOINTS]",
    ),
    click.option(
        "--run-id", envvar="ETC_RUN_ID", metavar="NAME",
        help="The job; may be left out where it is the only one. [ETC_RUN_ID]",
    ),
    click.option(
        "--etcd-prefix", envvar="ETC_PREFIX", metavar="/PREFIX", default="/etc-run", show_default=True,
        help="All keys lie under this prefix and the run id. [ETC_PREFIX]",
    ),
    click.option(
        "--etcd-user", envvar="ETC_USER", metavar="NAME",
        help="Its password comes from ETC_PASSWORD or --etcd-password-file. [ETC_USER]",
    ),
    click.option("--etcd-password-file", envvar="ETC_PASSWORD_FILE", metavar="FILE", type=Path),
    click.option("--etcd-ca-file", envvar="ETC_CA_FILE", metavar="PEM", type=Path, help="Turns TLS on. [ETC_CA_FILE]"),
    click.option("--etcd-cert-file", envvar="ETC_CERT_FILE", metavar="PEM", type=Path, help="[ETC_CERT_FILE]"),
    click.option("--etcd-key-file", envvar="ETC_KEY_FILE", metavar="PEM", type=Path, help="[ETC_KEY_FILE]"),
    click.option(
        "--etcd-timeout", envvar="ETC_ETCD_TIMEOUT", metavar="SECONDS", type=click.FloatRange(min=0.1), default=5.0,
        show_default=True, help="For one request to etcd, retries included. [ETC_ETCD_TIMEOUT]",
    ),
)
_TIMEOUT = click.option(
    "--timeout", "timeout_s", metavar="SECONDS", type=click.FloatRange(min=0),
    help=f"How long to wait for an answer ({ANSWER_S:g}), or with --wait for the end ({WAIT_S:g}).",
)
_WAIT = click.option("--wait", is_flag=True, help="Return when it is done.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def with_job(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that find a job, and call it with that job's client and keys first."""

    @functools.wraps(command)
    def run(
        *,
        etcd_endpoints: str,
        run_id: str | None,
        etcd_prefix: str,
        etcd_user: str | None,
        etcd_password_file: Path | None,
        etcd_ca_file: Path | None,
        etcd_cert_file: Path | None,
        etcd_key_file: Path | None,
        etcd_timeout: float,
        **rest: Any,
    ) -> None:
        etcd = EtcdSettings(
            endpoints=parse_endpoints([etcd_endpoints], "--etcd-endpoints"),
            prefix=etcd_prefix,
            ca_file=etcd_ca_file and check_readable(etcd_ca_file, "--etcd-ca-file"),
            cert_file=etcd_cert_file and check_readable(etcd_cert_file, "--etcd-cert-file"),
            key_file=etcd_key_file and check_readable(etcd_key_file, "--etcd-key-file"),
            user=etcd_user,
            password=password_of(etcd_password_file),
        )
        with connect(etcd, etcd_timeout) as client:
            command(client, admin.find_job(client, etcd_prefix, run_id), **rest)

    for option in reversed(_ETCD_OPTIONS):
        run = option(run)
    return run


def password_of(file: Path | None) -> str | None:
    """The etcd password: from `file` where it is given, else from ETC_PASSWORD."""
    return read_password(file, "--etcd-password-file") if file else os.environ.get("ETC_PASSWORD") or None


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="etc-ctl", message="%(prog)s %(version)s")
def cli() -> None:
    """Look at a running job, and ask it to change its size."""


@cli.command()
@with_job
@_JSON
def status(client: EtcdClient, keys: JobKeys, as_json: bool) -> None:
    """What the job does now."""
    snapshot = snapshot_of(client, keys)
    fields = status_fields(snapshot, keys)
    if as_json:
        click.echo(json.dumps(fields))
    else:
        console().print(status_table(fields))


@cli.command()
@click.argument("value")
@with_job
@_WAIT
@_TIMEOUT
def scale(client: EtcdClient, keys: JobKeys, value: str, wait: bool, timeout_s: float | None) -> None:
    """Ask for another size: VALUE is a number of workers (8), nodes=4, a config (PP4TP2DP2) or max.

    Exit code 1: refused. 3: the job has the size, but all workers were restarted on the way, from the last checkpoint.
    """
    timeout_s = timeout_s if timeout_s is not None else WAIT_S if wait else ANSWER_S
    result = admin.scale(client, keys, value, wait=wait, timeout_s=timeout_s, on_reply=_print_reply)
    if result is None:
        click.echo(f"the job is paused; {value} waits for etc-ctl resume")
    elif result in _EXIT_CODES:
        sys.exit(_EXIT_CODES[result])


@cli.command()
@click.argument("node")
@with_job
@click.option(
    "--deadline", "deadline_s", metavar="SECONDS", type=click.FloatRange(min=0), help="Time to hand over its state."
)
@_WAIT
@_TIMEOUT
def drain(
    client: EtcdClient, keys: JobKeys, node: str, deadline_s: float | None, wait: bool, timeout_s: float | None
) -> None:
    """Ask NODE to hand over its state and leave."""
    timeout_s = WAIT_S if timeout_s is None else timeout_s
    admin.drain(client, keys, node, deadline_s=deadline_s, wait=wait, timeout_s=timeout_s)
    click.echo(f"node {node} {'has left' if wait else 'is asked to leave'}")


@cli.command()
@with_job
def pause(client: EtcdClient, keys: JobKeys) -> None:
    """Freeze reconfiguration; training goes on."""
    admin.pause(client, keys)
    click.echo(f"job {keys.run_id} is paused: it keeps its size until etc-ctl resume")


@cli.command()
@with_job
def resume(client: EtcdClient, keys: JobKeys) -> None:
    """End a pause."""
    admin.resume(client, keys)
    click.echo(f"job {keys.run_id} may change its size again")


@cli.command()
@with_job
@_JSON
def events(client: EtcdClient, keys: JobKeys, as_json: bool) -> None:
    """What has happened: one line per generation."""
    records = history_of(snapshot_of(client, keys), keys)
    if as_json:
        for record in records:
            click.echo(json.dumps(dataclasses.asdict(record)))
    else:
        console().print(history_table(records))


@cli.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []}, short_help="What a change would move."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(arguments: tuple[str, ...]) -> None:
    """What a change would move, worked out without a job. Loaded when asked for: it needs numpy and scipy."""
    import_module("launcher.plan_command").plan.main(list(arguments), prog_name="etc-ctl plan")


def snapshot_of(client: EtcdClient, keys: JobKeys) -> Snapshot:
    """Every key of the job at one revision."""
    entries, revision = client.get_prefix(keys.root)
    return Snapshot({entry.key: entry for entry in entries}, revision)


def history_of(snapshot: Snapshot, keys: JobKeys) -> list[History]:
    """The history records, by generation."""
    records = [History.from_json(item.json()) for item in snapshot.under(keys.history_prefix).values()]
    return sorted(records, key=lambda record: record.generation)


def status_fields(snapshot: Snapshot, keys: JobKeys) -> dict[str, Any]:
    """What `status` shows: the leader's own account, then what the records say."""
    item, current = snapshot.get(keys.status), admin.current_of(snapshot, keys)
    from_leader = dict(item.json()) if item else {}
    fields: dict[str, Any] = {"run_id": keys.run_id, **from_leader}
    fields["generation"] = current.committed
    if current.proposed:
        fields["changing_to"] = f"generation {current.proposed} ({current.phase})"
    if current.outcome:
        fields["outcome"] = f"{current.outcome} (exit code {current.exit_code}): {current.why}"
    nodes = [NodeRecord.from_json(node.json()) for node in snapshot.under(keys.nodes_prefix).values()]
    drains = snapshot.under(keys.drains_prefix)
    fields["nodes"] = [
        f"{node.name} ({node.num_slots} slots, {'draining' if node.name in drains else node.state})" for node in nodes
    ]
    leader = snapshot.get(keys.leader)
    fields["leader"] = leader.text if leader else "none"
    if admin.is_paused(snapshot, keys):
        fields["paused"] = True
    if (reply := admin.reply_of(snapshot, keys)) is not None:
        fields["last_request"] = f"{reply.request}: {reply.result}: {reply.message}"
    if current.given_up:
        fields["given_up"] = [f"{given_up.config}: {given_up.why}" for given_up in current.given_up]
    if "time" in from_leader:
        fields["time"] = when(from_leader["time"])
    return fields


def _print_reply(reply: Reply) -> None:
    generation = f" (generation {reply.generation})" if reply.generation else ""
    click.echo(f"{reply.request}: {reply.result}{generation}: {reply.message}")


def main() -> int:
    """Run the command line; a mistake or an absent etcd is one line and exit code 1."""
    try:
        cli.main(standalone_mode=True, prog_name="etc-ctl")
    except EtcError as error:
        click.echo(f"etc-ctl: {error}", err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
