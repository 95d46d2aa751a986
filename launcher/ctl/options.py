"""The options that commands share: which etcd, which job, how to show the answer, how long to wait."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from etc_agent.agent.etcd import connect
from etc_agent.agent.settings import EtcdSettings
from etc_agent.parallel.config import ParallelConfig
from etc_agent.reconfig.sizes.wanted import parse_wanted
from etc_agent.rendezvous.keys import DEFAULT_PREFIX
from launcher.ctl.contexts import NO_CONTEXT, Context, read_contexts
from launcher.ctl.exits import CtlError, Exit
from launcher.ctl.job.finding import find_job
from launcher.ctl.show.output import Output
from launcher.etcd_options import check_readable, parse_endpoints, read_password

ANSWER_S = 15.0
WAIT_S = 600.0

_DEFAULTS: dict[str, Any] = {
    "etcd_endpoints": "127.0.0.1:2379", "etcd_prefix": DEFAULT_PREFIX, "etcd_timeout": 5.0,
}
_ETCD_OPTIONS = (
    click.option(
        "--context", envvar="ETC_CONTEXT", metavar="NAME",
        help="An etcd, and maybe a job, by its name in the contexts file; see etc-ctl contexts. [ETC_CONTEXT]",
    ),
    click.option(
        "--etcd-endpoints", envvar="ETC_ENDPOINTS", metavar="HOST:PORT,...",
        help="etcd v3 servers; https://HOST:PORT for TLS.  [ETC_ENDPOINTS; default: 127.0.0.1:2379]",
    ),
    click.option(
        "--etcd-prefix", envvar="ETC_PREFIX", metavar="/PREFIX",
        help=f"All keys lie under this prefix and the run id.  [ETC_PREFIX; default: {DEFAULT_PREFIX}]",
    ),
    click.option(
        "--etcd-user", envvar="ETC_USER", metavar="NAME",
        help="Its password comes from ETC_PASSWORD or --etcd-password-file.  [ETC_USER]",
    ),
    click.option("--etcd-password-file", envvar="ETC_PASSWORD_FILE", metavar="FILE", type=Path,
                 help="[ETC_PASSWORD_FILE]"),
    click.option("--etcd-ca-file", envvar="ETC_CA_FILE", metavar="PEM", type=Path, help="Turns TLS on.  [ETC_CA_FILE]"),
    click.option("--etcd-cert-file", envvar="ETC_CERT_FILE", metavar="PEM", type=Path, help="[ETC_CERT_FILE]"),
    click.option("--etcd-key-file", envvar="ETC_KEY_FILE", metavar="PEM", type=Path, help="[ETC_KEY_FILE]"),
    click.option(
        "--etcd-timeout", envvar="ETC_ETCD_TIMEOUT", metavar="SECONDS", type=click.FloatRange(min=0.1),
        help="For one request to etcd, retries included.  [ETC_ETCD_TIMEOUT; default: 5]",
    ),
)
_RUN_ID = click.option(
    "--run-id", envvar="ETC_RUN_ID", metavar="NAME",
    help="The job; may be left out where it is the only one.  [ETC_RUN_ID]",
)
timeout_option = click.option(
    "--timeout", "timeout_s", metavar="SECONDS", type=click.FloatRange(min=0),
    help=f"How long to wait for an answer ({ANSWER_S:g}), or with --wait for the end ({WAIT_S:g}).",
)
wait_option = click.option("--wait", is_flag=True, help="Return when it is done.")
why_option = click.option("--why", default="", metavar="TEXT", help="The reason, for whoever looks at the job.")


def output_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--output text|json``, or ``-o`` for short, as its parameter `output`."""
    return _with_output(command, "--output", "-o")


def output_option_in_full(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same without the short form, for a command that writes a file with ``-o``."""
    return _with_output(command, "--output")


def _with_output(command: Callable[..., Any], *names: str) -> Callable[..., Any]:
    @functools.wraps(command)
    def run(*args: Any, output_form: str, is_json: bool, **rest: Any) -> Any:
        return command(*args, output=Output("json" if is_json else output_form), **rest)

    run = click.option("--json", "is_json", is_flag=True, help="Short for --output json.")(run)
    return click.option(
        *names, "output_form", type=click.Choice(["text", "json"]), default="text", show_default=True,
        help="json: one object, or one object a line.",
    )(run)


def with_etcd(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that find an etcd, and call it with a client and the prefix of all jobs first."""

    @functools.wraps(command)
    def run(context: str | None, **given: Any) -> Any:
        settings, rest = _settings(_chosen_context(context), given)
        with connect(settings, rest.pop("etcd_timeout")) as client:
            return command(client, settings.prefix, **rest)

    for option in reversed(_ETCD_OPTIONS):
        run = option(run)
    return run


def with_job(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that find a job, and call it with that job's client and keys first."""

    @functools.wraps(command)
    def run(context: str | None, run_id: str | None, **given: Any) -> Any:
        chosen = _chosen_context(context)
        settings, rest = _settings(chosen, given)
        with connect(settings, rest.pop("etcd_timeout")) as client:
            keys = find_job(client, settings.prefix, run_id or chosen.values.get("run_id"))
            return command(client, keys, **rest)

    for option in reversed((_RUN_ID, *_ETCD_OPTIONS)):
        run = option(run)
    return run


def _chosen_context(name: str | None) -> Context:
    """The context that counts: one that is named; else, where no etcd is named either, the file's current one."""
    source = click.get_current_context().get_parameter_source("etcd_endpoints")
    if name is None and source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
        return NO_CONTEXT
    return read_contexts().choose(name)


def _settings(context: Context, given: dict[str, Any]) -> tuple[EtcdSettings, dict[str, Any]]:
    """Where etcd is, and the other parameters. What is typed or in the environment counts before the context."""
    named = {option.name for option in click.get_current_context().command.params}
    chosen = {
        name: given[name] if given[name] is not None else context.values.get(name, _DEFAULTS.get(name))
        for name in given if name.startswith("etcd_") and name in named
    }
    rest = {name: value for name, value in given.items() if name not in chosen}
    user, password = chosen["etcd_user"], password_of(chosen["etcd_password_file"])
    if user is not None and password is None:
        raise CtlError(
            Exit.MISTAKE, f"--etcd-user {user}: no password; set ETC_PASSWORD or give --etcd-password-file FILE"
        )
    if user is None and chosen["etcd_password_file"] is not None:
        raise CtlError(Exit.MISTAKE, "--etcd-password-file: a password without a user; add --etcd-user NAME")
    files = {
        name: chosen[f"etcd_{name}"] and check_readable(chosen[f"etcd_{name}"], f"--etcd-{name.replace('_', '-')}")
        for name in ("ca_file", "cert_file", "key_file")
    }
    settings = EtcdSettings(
        endpoints=parse_endpoints([chosen["etcd_endpoints"]], "--etcd-endpoints"),
        prefix=chosen["etcd_prefix"],
        user=user,
        password=None if user is None else password,
        **files,
    )
    return settings, {**rest, "etcd_timeout": chosen["etcd_timeout"]}


def password_of(file: Path | None) -> str | None:
    """The etcd password: from `file` where it is given, else from ETC_PASSWORD."""
    return read_password(file, "--etcd-password-file") if file else os.environ.get("ETC_PASSWORD") or None


class SizeType(click.ParamType):
    """A value of ``control/scale``, checked before anything is asked or written."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_wanted(value if value.strip() else repr(value))  # in etcd the empty text means max; here it is a slip
        except ValueError as error:
            raise CtlError(Exit.MISTAKE, str(error)) from None
        return str(value)


class ConfigType(click.ParamType):
    """A parallel config."""

    name = "config"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ParallelConfig:
        try:
            return ParallelConfig.parse(str(value))
        except ValueError as error:
            raise CtlError(Exit.MISTAKE, str(error)) from None
