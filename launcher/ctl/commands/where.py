"""contexts: which etcds this user has named, and which one counts."""

from __future__ import annotations

from typing import Any

import click

from launcher.ctl.contexts import Context, read_contexts
from launcher.ctl.options import output_option
from launcher.ctl.show.output import Output
from launcher.ctl.show.tables import plain_table


@click.command()
@output_option
def contexts(output: Output) -> None:
    """The named etcds of the contexts file.

    The current one is marked.

    The file is etc-run/contexts.yaml in ~/.config, or the one that ETC_CONTEXTS names:

    \b
    current: lab
    contexts:
      lab: {endpoints: ["etcd0:2379"]}
      prod: {endpoints: ["https://etcd:2379"], ca_file: ca.pem, user: ada, password_file: ~/.etcd, run_id: big}

    \b
    etc-ctl contexts
    etc-ctl list --context prod
    """
    found = read_contexts()
    rows = [_row(context, found.current) for context in found.by_name.values()]

    def text() -> Any:
        if not rows:
            return f"no contexts in {found.path}"
        table = plain_table("", "context", "etcd", "prefix", "run id", "user")
        for row in rows:
            table.add_row("*" if row["current"] else "", row["name"], row["endpoints"], row["prefix"] or "",
                          row["run_id"] or "", row["user"] or "")
        return table

    output.show_all(rows, text)


def _row(context: Context, current: str | None) -> dict[str, Any]:
    values = context.values
    return {
        "name": context.name, "current": context.name == current, "endpoints": values["etcd_endpoints"],
        "prefix": values.get("etcd_prefix"), "run_id": values.get("run_id"), "user": values.get("etcd_user"),
    }
