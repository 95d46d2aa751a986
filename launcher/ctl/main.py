"""The list of etc-ctl's commands, and running one: a mistake is one line and an exit code."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from etc_agent.errors import EtcError
from etc_agent.rendezvous.etcd.errors import EtcdUnavailable
from etc_agent.version import version
from launcher.ctl.commands import access, changing, logs, looking, past, reporting, top, waiting, where
from launcher.ctl.exits import CtlError, Exit

_HELP = ["-h", "--help"]


@click.group(context_settings={"help_option_names": _HELP})
@click.version_option(version(), prog_name="etc-ctl", message="%(prog)s %(version)s")
def cli() -> None:
    """Look at running jobs, and ask them to change their size.

    Reading commands never write. Exit codes: 0 done, 1 refused or failed, 2 a mistake in the command, 3 done with a
    restart of all workers, 4 not found, 5 no answer in time, 6 the job has ended, 7 etcd does not answer.

    \b
    Completion: eval "$(_ETC_CTL_COMPLETE=bash_source etc-ctl)"    (or zsh_source, fish_source)
    """


@cli.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []}, short_help="What a change would move."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(arguments: tuple[str, ...]) -> None:
    """What a change would move, worked out without a job. Loaded when asked for: it needs numpy and scipy."""
    import_module("launcher.ctl.planning.command").plan.main(list(arguments), prog_name="etc-ctl plan")


@cli.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Whether a script can change its size.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def check(arguments: tuple[str, ...]) -> int:
    """What a script would be refused for, worked out without a job. In a process of its own: it imports the script."""
    command = [sys.executable, "-m", "etc_agent.check", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    click.echo(ended.stdout, nl=False)
    click.echo(ended.stderr, nl=False, err=True)
    return ended.returncode


for _command in (
    looking.list_jobs, looking.status, looking.explain, top.top, logs.logs, past.history, reporting.report,
    waiting.wait,
    changing.scale, changing.drain, changing.cordon, changing.uncordon, changing.pause, changing.resume, changing.stop,
    where.contexts, access.role,
):
    cli.add_command(_command)
cli.add_command(past.history, "events")


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line that was typed, or `argv`; its exit code (docs/operating.md has the table)."""
    logging.basicConfig(format="etc-ctl: %(message)s", level=logging.WARNING)
    try:
        code = cli.main(argv, standalone_mode=False, prog_name="etc-ctl")
        return code if isinstance(code, int) else Exit.DONE
    except SystemExit as end:  # shell completion ends like this
        return end.code if isinstance(end.code, int) else Exit.DONE
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.Abort:
        return 130
    except click.ClickException as error:
        return _complain(_usage(error), error.exit_code)
    except CtlError as error:
        return _complain(str(error), error.exit_code)
    except EtcdUnavailable as error:
        return _complain(str(error), Exit.NO_ETCD)
    except EtcError as error:
        return _complain(str(error), Exit.FAILED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stderr.close()
        return Exit.DONE


def _usage(error: click.ClickException) -> str:
    """A mistake in the command line in one line, with where to look."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f"; see {context.command_path} --help" if context is not None else ""
    return f"{error.format_message().rstrip('.')}{hint}"


def _complain(message: str, exit_code: int) -> int:
    click.echo(f"etc-ctl: {message}", err=True)
    return int(exit_code)
